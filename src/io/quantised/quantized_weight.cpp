#include "io/quantised/quantized_weight.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/check.h"

namespace nanovllm {
namespace {

const char* number_name(const QuantScheme& scheme) {
  switch (scheme.while_loading ? QuantStorage::int8 : scheme.storage) {
    case QuantStorage::packed:
      return ".weight_packed";
    case QuantStorage::gptq:
    case QuantStorage::awq:
      return ".qweight";
    default:
      return ".weight";
  }
}

}  // namespace

std::optional<WeightFormat> QuantScheme::kept_format(int64_t begin, int64_t end) const {
  const int64_t columns = scales == QuantScales::group   ? group_size
                          : scales == QuantScales::block ? kQuantBlock
                                                         : end - begin;
  const bool in_rows = scales == QuantScales::tensor || scales == QuantScales::channel;
  if (is_ordered || (!in_rows && (begin % columns != 0 || end % columns != 0))) return std::nullopt;
  const bool is_e4m3 = storage == QuantStorage::e4m3;
  using Rows = WeightFormat::Rows;
  const bool is_int4 = !is_e4m3 && bits == 4;
  const Rows rows = activations == QuantActivations::group && is_e4m3                ? Rows::group
                    : activations == QuantActivations::token && (in_rows || is_int4) ? Rows::token
                    : activations == QuantActivations::tensor && is_e4m3             ? Rows::tensor
                                                                                     : Rows::plain;
  return WeightFormat(is_e4m3   ? WeightFormat::e4m3
                      : is_int4 ? WeightFormat::int4
                                : WeightFormat::int8,
                      columns, rows);
}

bool QuantizedWeight::is_in(const Checkpoint& checkpoint, const std::string& module,
                            const QuantScheme& scheme) {
  const StoredTensor* numbers = checkpoint.find(module + number_name(scheme));
  return numbers && (scheme.while_loading || !numbers->loadable_dtype());
}

QuantizedWeight::QuantizedWeight(const Checkpoint& checkpoint, const std::string& module,
                                 const QuantScheme& scheme, int64_t n, int64_t k)
    : checkpoint_(&checkpoint),
      module_(module),
      scheme_(scheme),
      n_(n),
      k_(k),
      per_word_(32 / scheme.bits) {
  if (scheme.scales == QuantScales::group) {
    check(k % scheme.group_size == 0, ErrorKind::model,
          "{}: {} has {} columns, which groups of {} do not fill", checkpoint.directory(), module,
          k, scheme.group_size);
    groups_ = k / scheme.group_size;
  } else if (scheme.scales == QuantScales::block) {
    groups_ = divide_up(k, kQuantBlock);
  }
  if (scheme.while_loading)
    numbers_ = take(".weight", {"BF16", "F16", "F32"}, {{n, k}}, k);
  else if (scheme.storage == QuantStorage::packed)
    take_packed(n, k);
  else if (scheme.storage == QuantStorage::gptq || scheme.storage == QuantStorage::awq)
    take_transposed(n, k);
  else
    take_bytes(n, k);
  if (scheme.activations == QuantActivations::tensor) {
    const Place place = take(".input_scale", {"F32", "F16", "BF16"}, {{1}, {}}, 1);
    input_scale_ = read_floats(place, {0, 1, 0, 1}).front();
    check(input_scale_ >= kLeastScale && input_scale_ <= 1 / kLeastScale, ErrorKind::model,
          "{}: tensor {} has a scale of {}: scales of activations are from 2^-100 to 2^100",
          checkpoint.file_of(place.name), place.name, input_scale_);
  }
}

QuantizedWeight::Place QuantizedWeight::take(const std::string& name,
                                             std::vector<std::string> dtypes,
                                             std::vector<std::vector<int64_t>> shapes,
                                             int64_t cols) {
  Place place{module_ + name, checkpoint_->find(module_ + name), cols, 0};
  check(place.tensor != nullptr, ErrorKind::model,
        "{}: the checkpoint lacks tensor {}, which config.json's quantization_config needs",
        checkpoint_->directory(), place.name);
  const auto is_one = [](const auto& list, const auto& value) {
    return std::find(list.begin(), list.end(), value) != list.end();
  };
  check(is_one(dtypes, place.tensor->dtype) && is_one(shapes, place.tensor->shape),
        ErrorKind::model, "{}: tensor {} is {}, config.json's quantization_config asks for {}[{}]",
        checkpoint_->file_of(place.name), place.name, place.tensor->describe(),
        fmt::join(dtypes, " or "), fmt::join(shapes.front(), ", "));
  int64_t elements = 1;
  for (const int64_t size : place.tensor->shape) elements *= size;
  place.size = place.tensor->data.size() / static_cast<size_t>(std::max<int64_t>(elements, 1));
  names_.push_back(place.name);
  return place;
}

void QuantizedWeight::take_packed(int64_t n, int64_t k) {
  check(k % per_word_ == 0, ErrorKind::model, "{}: {} has {} columns, not a multiple of {}",
        checkpoint_->directory(), module_, k, per_word_);
  numbers_ = take(".weight_packed", {"I32"}, {{n, k / per_word_}}, k / per_word_);
  scales_ = take(".weight_scale", {"F32", "F16", "BF16"}, {{n, groups_}}, groups_);
  const Place shape = take(".weight_shape", {"I64", "I32"}, {{2}}, 2);
  const auto bytes = read(shape, {0, 1, 0, 2});
  int64_t sizes[2] = {0, 0};
  for (size_t i = 0; i < 2; ++i) std::memcpy(&sizes[i], bytes.data() + i * shape.size, shape.size);
  check(sizes[0] == n && sizes[1] == k, ErrorKind::model,
        "{}: tensor {} says [{}, {}], config.json asks for [{}, {}]",
        checkpoint_->file_of(shape.name), shape.name, sizes[0], sizes[1], n, k);
  if (!scheme_.symmetric) {
    const StoredTensor* zeros = checkpoint_->find(module_ + ".weight_zero_point");
    zeros_are_bytes_ = zeros && zeros->dtype == "I8";  // of early versions
    zeros_ = zeros_are_bytes_ ? take(".weight_zero_point", {"I8"}, {{n, groups_}}, groups_)
                              : take(".weight_zero_point", {"I32"},
                                     {{divide_up(n, per_word_), groups_}}, groups_);
  }
  if (scheme_.is_ordered) read_order(k);
}

void QuantizedWeight::take_transposed(int64_t n, int64_t k) {
  const bool is_gptq = scheme_.storage == QuantStorage::gptq;
  check((is_gptq ? k : n) % per_word_ == 0 && n % per_word_ == 0, ErrorKind::model,
        "{}: {} is [{}, {}], not a multiple of {}", checkpoint_->directory(), module_, n, k,
        per_word_);
  if (is_gptq)
    numbers_ = take(".qweight", {"I32"}, {{k / per_word_, n}}, n);
  else
    numbers_ = take(".qweight", {"I32"}, {{k, n / per_word_}}, n / per_word_);
  zeros_ = take(".qzeros", {"I32"}, {{groups_, n / per_word_}}, n / per_word_);
  scales_ = take(".scales", {"F16", "BF16", "F32"}, {{groups_, n}}, n);
  if (is_gptq && (scheme_.is_ordered || checkpoint_->find(module_ + ".g_idx"))) read_order(k);
}

void QuantizedWeight::take_bytes(int64_t n, int64_t k) {
  numbers_ =
      take(".weight", {scheme_.storage == QuantStorage::e4m3 ? "F8_E4M3" : "I8"}, {{n, k}}, k);
  const std::string name = "." + scheme_.scale_name;
  const std::vector<std::string> dtypes = {"F32", "BF16", "F16"};
  if (scheme_.scales == QuantScales::tensor)
    scales_ = take(name, dtypes, {{1}, {}, {1, 1}}, 1);
  else if (scheme_.scales == QuantScales::channel)
    scales_ = take(name, dtypes, {{n, 1}, {n}}, 1);
  else if (scheme_.scales == QuantScales::group)
    scales_ = take(name, dtypes, {{n, groups_}}, groups_);
  else
    scales_ = take(name, dtypes, {{divide_up(n, kQuantBlock), groups_}}, groups_);
}

/// The group of each column: those of a group need not be neighbours, but fill it.
void QuantizedWeight::read_order(int64_t k) {
  const Place place =
      take(scheme_.storage == QuantStorage::packed ? ".weight_g_idx" : ".g_idx", {"I32"}, {{k}}, k);
  const auto bytes = read(place, {0, 1, 0, k});
  order_.resize(static_cast<size_t>(k));
  std::memcpy(order_.data(), bytes.data(), bytes.size());
  std::vector<int64_t> sizes(static_cast<size_t>(groups_), 0);
  const int64_t size = k / groups_;
  bool fits = true, in_order = true;
  for (int64_t c = 0; c < k; ++c) {
    const int32_t group = order_[static_cast<size_t>(c)];
    const bool exists = group >= 0 && group < groups_;
    fits = fits && exists && ++sizes[static_cast<size_t>(group)] <= size;
    in_order = in_order && group == c / size;
  }
  check(fits, ErrorKind::model, "{}: tensor {} does not put {} columns into each of {} groups",
        checkpoint_->file_of(place.name), place.name, size, groups_);
  check(in_order || scheme_.is_ordered, ErrorKind::model,
        "{}: tensor {} reorders the columns, but config.json's desc_act is false",
        checkpoint_->file_of(place.name), place.name);
  if (in_order) order_.clear();
}

}  // namespace nanovllm
