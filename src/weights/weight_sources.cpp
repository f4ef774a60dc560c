// A checkpoint as sources of parameters: its tensors checked and sliced, and dequantised where they
// are quantised.
#include "weights/weight_sources.h"

#include <algorithm>
#include <memory>
#include <unordered_set>

#include <fmt/ranges.h>

#include "io/quantised/quantized_weight.h"
#include "io/run_all.h"
#include "io/safetensors/checkpoint.h"

namespace nanovllm {
namespace {

/// Host memory for numbers that are loaded together, but for a weight that is larger: dequantised
/// ones, and those that stay quantised, whose memory is the next ones' and stays in a cache.
constexpr size_t kMostHostBytes = size_t{256} << 20, kMostKeptBytes = size_t{8} << 20;
/// Rows of a weight that are read and dequantised at once.
constexpr int64_t kRowsAtOnce = 128, kPlainRowsAtOnce = 16;

/// The module whose weight the tensor is; of others none.
std::string module_of(const std::string& tensor) {
  constexpr std::string_view kWeight = ".weight";
  return tensor.ends_with(kWeight) ? tensor.substr(0, tensor.size() - kWeight.size()) : "";
}

}  // namespace

Tensor slice(Tensor t, const WeightPart& part) {
  t = t.rows(part.row_begin, part.row_end < 0 ? t.shape[0] : part.row_end);
  if (t.rank > 1 && (part.col_begin != 0 || part.col_end >= 0))
    t = t.cols(part.col_begin, part.col_end < 0 ? t.shape[1] : part.col_end);
  return t;
}

void pad_rows(std::vector<Tensor>& sources, const Tensor& dst, std::vector<float>& zeros) {
  int64_t missing = dst.shape[0];
  for (const Tensor& source : sources) missing -= source.shape[0];
  if (missing <= 0) return;
  zeros.assign(static_cast<size_t>(missing * dst.shape[1]), 0);
  // Bytes of zeros are zeros in any dtype: that of the other rows, which may be moved as they are.
  sources.emplace_back(zeros.data(), sources.empty() ? dst.dtype : sources.front().dtype,
                       std::initializer_list<int64_t>{missing, dst.shape[1]});
}

/// A checkpoint, and how it is quantised.
class WeightLoader::CheckpointSources {
 public:
  CheckpointSources(const Checkpoint& checkpoint, const QuantizationConfig* quantization)
      : checkpoint_(checkpoint), quantization_(quantization) {}

  /// Throws unless the parameters find their tensors, and the tensors their parameters.
  void check_complete(const std::vector<Parameter>& parameters,
                      const std::map<std::string, std::string>& ignored) {
    std::unordered_set<std::string> wanted;
    for (const Parameter& parameter : parameters)
      for (const WeightPart& part : parameter.parts) {
        check(!parameter.format.is_quantised() || scheme_of(part), ErrorKind::model,
              "{}: tensor {} is plain, but config.json's quantization_config says that it is "
              "quantised: name its module among those that are not",
              checkpoint_.directory(), part.name);
        float& input_scale = input_scales_[parameter.first];
        input_scale = std::max(input_scale, check_part(part, wanted));
      }
    for (const std::string& name : checkpoint_.names())
      check(wanted.contains(name) || ignored.contains(name) || may_be_left(name), ErrorKind::model,
            "{}: tensor {} has no place in this architecture; is config.json of another model{}?",
            checkpoint_.file_of(name), name, quantization_ ? ", or quantised otherwise" : "");
    for (const auto& [name, original] : ignored)
      check(is_copy(name, original), ErrorKind::model,
            "{}: tensor {} is no copy of {}, as config.json has it: if it was trained apart, set "
            "tie_word_embeddings to false",
            checkpoint_.directory(), name, original);
  }

  /// Makes the sources of the parameters from `first` on: all that are plain, and as many as
  /// kMostHostBytes take of those that are not. They live until the next call.
  Sources make(const std::vector<Parameter>& parameters, size_t first) {
    Sources sources{.of = {}, .rows = {}, .first = first};
    memory_.clear();
    padding_.assign(parameters.size(), {});
    std::vector<std::function<void()>> work;
    size_t bytes = 0;
    for (size_t i = first; i < parameters.size(); ++i) {
      const Parameter& p = parameters[i];
      if (std::any_of(p.parts.begin(), p.parts.end(),
                      [&](const WeightPart& part) { return scheme_of(part) != nullptr; }))
        bytes += p.format.is_quantised() ? static_cast<size_t>(p.dst.numel()) : p.dst.bytes();
      if (i > first && bytes > (p.format.is_quantised() ? kMostKeptBytes : kMostHostBytes)) break;
      auto& of = sources.of.emplace_back();
      if (p.format.is_quantised()) {
        fill(sources.rows[i], p, work);
        continue;
      }
      for (const WeightPart& part : p.parts)
        if (part.row_begin != part.row_end) of.push_back(source_of(part, p.dst.dtype, work));
      if (p.is_matrix) pad_rows(of, p.dst, padding_[i]);
    }
    run_all(work);
    return sources;
  }

 private:
  /// How the part's weight is quantised; null: it is plain. Packed integers show by their names
  /// which modules are: lists of those that are not often leave out a router.
  const QuantScheme* scheme_of(const WeightPart& part) const {
    const std::string module = module_of(part.name);
    if (!quantization_ || module.empty() || part.shape.size() != 2) return nullptr;
    const QuantScheme* scheme = quantization_->find(module);
    const bool is_there = !scheme || QuantizedWeight::is_in(checkpoint_, module, *scheme);
    return is_there || !checkpoint_.find(part.name) ? scheme : nullptr;
  }

  /// The input_scale of the part's weight, or 0.
  float check_part(const WeightPart& part, std::unordered_set<std::string>& wanted) const {
    if (const QuantScheme* scheme = scheme_of(part)) {
      const QuantizedWeight weight(checkpoint_, module_of(part.name), *scheme, part.shape[0],
                                   part.shape[1]);
      wanted.insert(weight.names().begin(), weight.names().end());
      return weight.input_scale();
    }
    wanted.insert(part.name);
    const StoredTensor* found = checkpoint_.find(part.name);
    if (!found)
      fail(ErrorKind::model,
           "{}: the checkpoint lacks tensor {}, which config.json's architecture needs{}",
           checkpoint_.directory(), part.name, hint(part.name));
    check(found->loadable_dtype().has_value(), ErrorKind::model,
          "{}: tensor {} is {}; only F32, F16 and BF16 weights can be loaded{}",
          checkpoint_.file_of(part.name), part.name, found->dtype,
          quantization_ ? " where quantization_config names no other"
                        : ": config.json has no quantization_config");
    check(found->shape == part.shape, ErrorKind::model,
          "{}: tensor {} has shape [{}], config.json asks for [{}]", checkpoint_.file_of(part.name),
          part.name, fmt::join(found->shape, ", "), fmt::join(part.shape, ", "));
    return 0;
  }

  /// Why a file that others take may lack the tensor.
  std::string hint(const std::string& name) const {
    const std::string module = module_of(name);
    if (!quantization_ &&
        (checkpoint_.find(module + ".qweight") || checkpoint_.find(module + ".weight_packed")))
      return "; it is quantised, and config.json has no quantization_config: add it (of GPTQ, what "
             "quantize_config.json says, and \"quant_method\": \"gptq\")";
    if (const size_t experts = name.find(".experts.");
        experts != name.npos && checkpoint_.find(name.substr(0, experts) + ".experts.gate_up_proj"))
      return "; all experts are in one tensor, as transformers 5 has them in memory: its "
             "save_pretrained() writes each by itself unless save_original_format=False says "
             "otherwise";
    if (name == "lm_head.weight")
      return "; where the embedding is the head, too, set tie_word_embeddings to true";
    if (!name.starts_with("model.")) return "";
    if (checkpoint_.find(name.substr(6)))
      return "; names without \"model.\" are those of a model that makes embeddings, which is no "
             "model for text";
    const auto& names = checkpoint_.names();
    const auto other = std::ranges::find_if(
        names, [&](const std::string& n) { return n.ends_with(name.substr(5)); });
    return other == names.end()
               ? ""
               : fmt::format(
                     "; it has {}: a model that lies within another (PEFT's, or one for "
                     "images) is saved by itself first",
                     *other);
  }

  /// Whether the first tensor has the second's bytes, where both are there. A page of every 4 MiB
  /// is compared: what was trained apart differs everywhere, and reading all of it takes long.
  bool is_copy(const std::string& name, const std::string& original) const {
    const StoredTensor *copy = checkpoint_.find(name), *one = checkpoint_.find(original);
    if (!copy || !one) return true;
    if (copy->dtype != one->dtype || copy->shape != one->shape) return false;
    for (size_t at = 0; at < one->data.size(); at += size_t{4} << 20) {
      const size_t size = std::min(one->data.size() - at, size_t{4096});
      if (!std::ranges::equal(one->data.subspan(at, size), copy->data.subspan(at, size)))
        return false;
    }
    return true;
  }

  /// Tensors beside a quantised model's that change none of its numbers: scales of an FP8 KV
  /// cache, biases of zero that GPTQ may write for any layer, and zero points of zero beside
  /// symmetric numbers.
  bool may_be_left(const std::string& name) const {
    if (!quantization_) return false;
    for (const char* end :
         {".k_scale", ".v_scale", ".kv_scale", ".k_proj.output_scale", ".v_proj.output_scale"})
      if (name.ends_with(end)) return true;
    const StoredTensor& tensor = *checkpoint_.find(name);
    const bool is_bias = quantization_->method() == "gptq" && name.ends_with(".bias"),
               is_zero = name.ends_with("_zero_point") && tensor.dtype != "I32";
    if (!is_bias && !is_zero) return false;
    const auto bytes = tensor.data;
    std::vector<std::byte> copy(bytes.size());
    checkpoint_.read(copy, bytes.data());
    return std::all_of(copy.begin(), copy.end(), [](std::byte b) { return b == std::byte{0}; });
  }

  /// A quantised weight as it is, in memory that `work` fills.
  void fill(QuantizedRows& rows, const Parameter& p, std::vector<std::function<void()>>& work) {
    const int64_t n = p.dst.shape[0], k = p.dst.shape[1], groups = p.format.groups(k);
    rows.numbers.resize(static_cast<size_t>(n * k));
    rows.scales.resize(static_cast<size_t>(n * groups));
    if (p.format.has_zeros()) rows.zeros.resize(rows.scales.size());
    if (p.format.rows == WeightFormat::Rows::tensor) rows.input_scale = input_scales_.at(p.first);
    int64_t at = 0;
    for (const WeightPart& part : p.parts) {
      in_pieces(part, work,
                [&rows, at](const QuantizedWeight& weight, const WeightBlock& some, int64_t first) {
                  weight.copy_rows(rows, at + first, some);
                });
      at += block_of(part).rows();
    }
  }

  /// A view of the file or, of a quantised weight, memory that `work` fills.
  Tensor source_of(const WeightPart& part, DType dtype, std::vector<std::function<void()>>& work) {
    if (!scheme_of(part)) return slice(checkpoint_.find(part.name)->view(), part);
    const WeightBlock block = block_of(part);
    Tensor all(nullptr, dtype, {block.rows(), block.cols()});
    memory_.push_back(std::make_unique_for_overwrite<std::byte[]>(all.bytes()));
    all.data = memory_.back().get();
    in_pieces(part, work,
              [all](const QuantizedWeight& weight, const WeightBlock& some, int64_t first) {
                weight.dequantise(all.rows(first, first + some.rows()).data, all.dtype, some);
              });
    return all;
  }

  static WeightBlock block_of(const WeightPart& part) {
    return {part.row_begin, part.row_end < 0 ? part.shape[0] : part.row_end, part.col_begin,
            part.col_end < 0 ? part.shape[1] : part.col_end};
  }

  /// Adds what take() does with some rows of the part's quantised weight at a time, those from
  /// `first` of its block on.
  template <class Take>
  void in_pieces(const WeightPart& part, std::vector<std::function<void()>>& work, Take take) {
    const auto weight = std::make_shared<const QuantizedWeight>(
        checkpoint_, module_of(part.name), *scheme_of(part), part.shape[0], part.shape[1]);
    const WeightBlock block = block_of(part);
    // Pieces of a plain weight are small: the memory of one is good for the next.
    const int64_t step = scheme_of(part)->while_loading ? kPlainRowsAtOnce : kRowsAtOnce;
    for (int64_t r = 0; r < block.rows(); r += step)
      work.push_back([=] {
        WeightBlock some = block;
        some.row_begin += r;
        some.row_end = std::min(some.row_begin + step, block.row_end);
        take(*weight, some, r);
      });
  }

  const Checkpoint& checkpoint_;
  const QuantizationConfig* quantization_;
  /// Parts of one product, and experts of one stack, meet the same rows: the largest of their
  /// scales holds all of these. By Parameter::first.
  std::map<size_t, float> input_scales_;
  std::vector<std::unique_ptr<std::byte[]>> memory_;
  std::vector<std::vector<float>> padding_;
};

WeightFormat WeightLoader::format_of(std::span<const std::vector<WeightPart>> matrices, int64_t n,
                                     int64_t k, bool stacked, bool in_halves) const {
  WeightFormat plain = plain_format(dtype_);
  plain.in_halves = in_halves;
  std::optional<WeightFormat> one;
  for (const std::vector<WeightPart>& parts : matrices)
    for (const WeightPart& part : parts) {
      const QuantScheme* scheme = quantization_ && dtype_ == DType::bf16
                                      ? quantization_->find(module_of(part.name))
                                      : nullptr;
      const auto format = scheme && scheme->is_kept
                              ? scheme->kept_format(part.col_begin, part.col_begin + k)
                              : std::nullopt;
      if (!format || (one && *format != *one)) return plain;
      one = format;
    }
  if (!one) return plain;
  WeightFormat beside_plain_rows(one->numbers, one->group);
  beside_plain_rows.in_halves = in_halves;
  if (!one->quantises_rows())
    one = beside_plain_rows;
  else if (one->rows == WeightFormat::Rows::group)
    one->in_halves = in_halves;
  return backend_.keeps(*one, n, k, stacked)                ? *one
         : backend_.keeps(beside_plain_rows, n, k, stacked) ? beside_plain_rows
                                                            : plain;
}

void WeightLoader::load(const Checkpoint& checkpoint, const LoadProgress& progress) {
  check(storage_ != nullptr, "weights cannot be loaded in the counting pass");
  CheckpointSources from(checkpoint, quantization_);
  from.check_complete(parameters_, ignored_);
  const auto release = [&](size_t i) {
    for (const WeightPart& part : parameters_[i].parts) checkpoint.release(part.name);
  };
  const auto read = [&](std::span<std::byte> to, const std::byte* at) { checkpoint.read(to, at); };
  for (size_t first = 0; first < parameters_.size();) {
    const Sources sources = from.make(parameters_, first);
    load(sources, read, release, progress);
    first += sources.of.size();
  }
  checkpoint.check_unchanged();
}

}  // namespace nanovllm
