#include "io/quantize.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#include <nlohmann/json.hpp>

#include "core/check.h"
#include "io/quantization.h"
#include "io/quantized_weight.h"

namespace nanovllm {
namespace {

constexpr float kMostE4m3 = 448;
constexpr int32_t kMostE4m3Bits = 0x7e;

/// The bits of the largest magnitude: more than those of kInfinity where one is a NaN.
constexpr uint32_t kInfinity = 0x7f800000;
uint32_t largest_magnitude(std::span<const float> numbers) {
  int32_t most = 0;
  for (const float x : numbers)
    most = std::max(most, std::bit_cast<int32_t>(x) & 0x7fffffff);  // as magnitudes compare
  return static_cast<uint32_t>(most);
}

/// The nearest integer, ties to even, of a number below 2^22.
float round_even(float x) {
  constexpr float kHalves = 0x1.8p23f;  // no fractions are left above it
  return (x + kHalves) - kHalves;
}

/// The nearest E4M3 number's bits, ties to even, of a number that rounds to 448 at most.
uint8_t to_e4m3(float x) {
  // Signed, which vectors compare without instructions of their own.
  const auto bits = std::bit_cast<int32_t>(x), magnitude = bits & 0x7fffffff;
  // From 2^-6 on three bits of the mantissa stay; below, multiples of 2^-9.
  const int32_t normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
  const int32_t subnormal = std::bit_cast<int32_t>(std::bit_cast<float>(magnitude) + 0x1p14f) & 0xf;
  const int32_t is_normal = -static_cast<int32_t>(magnitude >= std::bit_cast<int32_t>(0x1p-6f));
  const int32_t number = (normal & is_normal) | (subnormal & ~is_normal);
  return static_cast<uint8_t>((bits >> 24 & 0x80) | std::min(number, kMostE4m3Bits));
}

float scale_for(float largest, float most) {
  return std::max(static_cast<float>(bf16(largest / most)), kLeastScale);
}

/// The sum of the squared errors of int4 under `scale`, in a fixed order.
float int4_error(std::span<const float> numbers, float scale) {
  constexpr size_t kLanes = 16;
  const float inverse = 1 / scale;  // near enough: this only chooses
  const auto square = [&](float x) {
    const float error = std::clamp(round_even(x * inverse), -8.0f, 7.0f) * scale - x;
    return error * error;
  };
  float sums[kLanes] = {}, sum = 0;
  size_t i = 0;
  for (; i + kLanes <= numbers.size(); i += kLanes)
    for (size_t lane = 0; lane < kLanes; ++lane) sums[lane] += square(numbers[i + lane]);
  for (const float lane : sums) sum += lane;
  for (; i < numbers.size(); ++i) sum += square(numbers[i]);
  return sum;
}

/// Of these shares of the largest magnitude, the one that rounds best; the earlier of two alike.
float int4_scale(std::span<const float> numbers, float largest) {
  float best = 0, least = 0;
  for (const float most : {7.0f, 7.5f, 8.0f, 9.0f, 10.0f}) {
    const float scale = scale_for(largest, most), error = int4_error(numbers, scale);
    if (best == 0 || error < least) {
      best = scale;
      least = error;
    }
  }
  return best;
}

void to_floats(const std::byte* from, const std::string& dtype, std::span<float> out) {
  if (dtype == "F32") {
    std::memcpy(out.data(), from, out.size_bytes());
    return;
  }
  const bool is_half = dtype == "F16";
  for (size_t i = 0; i < out.size(); ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, from + i * sizeof bits, sizeof bits);
    if (is_half) {
      f16 half;
      half.bits = bits;
      out[i] = static_cast<float>(half);
    } else {
      out[i] = std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
    }
  }
}

}  // namespace

float quantise(std::span<const float> numbers, WeightFormat::Numbers to, uint8_t* out) {
  const auto largest = std::bit_cast<float>(largest_magnitude(numbers));
  const float most = to == WeightFormat::e4m3 ? kMostE4m3 : 127;
  const float scale = largest == 0               ? 1
                      : to == WeightFormat::int4 ? int4_scale(numbers, largest)
                                                 : scale_for(largest, most);
  if (to == WeightFormat::e4m3) {
    for (size_t i = 0; i < numbers.size(); ++i) out[i] = to_e4m3(numbers[i] / scale);
  } else {
    const float low = to == WeightFormat::int4 ? -8.0f : -127.0f,
                high = to == WeightFormat::int4 ? 7.0f : 127.0f;
    const int middle = to == WeightFormat::int4 ? 8 : 128;
    for (size_t i = 0; i < numbers.size(); ++i)
      out[i] = static_cast<uint8_t>(
          static_cast<int>(std::clamp(round_even(numbers[i] / scale), low, high)) + middle);
  }
  return scale;
}

QuantizedWeight::Stored QuantizedWeight::stored(const WeightBlock& block) const {
  if (scheme_.while_loading) return quantise(block);
  Stored all{integers(block), group_scales(block), {}};
  all.zeros = scheme_.is_bytes() ? std::vector<float>(all.scales.size(), 0) : group_zeros(block);
  return all;
}

QuantizedWeight::Stored QuantizedWeight::quantise(const WeightBlock& block) const {
  // Whole groups: a scale is that of all its numbers, whichever of them the block has.
  const int64_t rows = block.rows(), cols = block.cols(), group = k_ / groups_;
  const WeightBlock whole{block.row_begin, block.row_end, block.col_begin / group * group,
                          (block.col_end + group - 1) / group * group};
  const auto bytes = read(numbers_, whole);
  const WeightFormat::Numbers to = scheme_.kept_format(0, k_).value().numbers;
  const float middle = scheme_.is_bytes() ? 0 : static_cast<float>(1 << (scheme_.bits - 1));
  Stored out{.numbers = std::vector<uint8_t>(static_cast<size_t>(rows * cols)),
             .scales = std::vector<float>(static_cast<size_t>(rows * groups_), 1),
             .zeros = std::vector<float>(static_cast<size_t>(rows * groups_), middle)};
  std::vector<float> numbers(static_cast<size_t>(group));
  std::vector<uint8_t> rounded(numbers.size());
  const std::byte* from = bytes.data();
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = whole.col_begin; c < whole.col_end; c += group) {
      to_floats(from, numbers_.tensor->dtype, numbers);
      from += numbers.size() * numbers_.size;
      check(largest_magnitude(numbers) < kInfinity, ErrorKind::model,
            "{}: tensor {} has a number that is not finite, and cannot be quantised",
            checkpoint_->file_of(numbers_.name), numbers_.name);
      const float scale = nanovllm::quantise(numbers, to, rounded.data());
      check(scale < kMostScale, ErrorKind::model,
            "{}: tensor {} has a number that is too large to be quantised",
            checkpoint_->file_of(numbers_.name), numbers_.name);
      out.scales[static_cast<size_t>(r * groups_ + c / group)] = scale;
      const int64_t begin = std::max(c, block.col_begin), end = std::min(c + group, block.col_end);
      std::copy_n(rounded.begin() + (begin - c), end - begin,
                  out.numbers.begin() + r * cols + begin - block.col_begin);
    }
  return out;
}

namespace {

/// The largest group that fills the rows of all weights.
int64_t int4_group(const ModelConfig& m) {
  bool has_mlps = false, has_experts = false;
  for (int64_t i = 0; i < m.num_hidden_layers; ++i)
    (m.moe && m.moe->is_sparse(i) ? has_experts : has_mlps) = true;
  std::vector<std::pair<const char*, int64_t>> widths = {
      {"hidden_size", m.hidden_size}, {"attention's", m.num_attention_heads * m.head_dim}};
  if (has_mlps) widths.emplace_back("intermediate_size", m.intermediate_size);
  if (has_experts) widths.emplace_back("moe_intermediate_size", m.moe->moe_intermediate_size);
  int64_t group = 128;
  for (const auto& [name, width] : widths) {
    group = std::gcd(group, width);
    check(group >= 32, ErrorKind::invalid_argument,
          "quantization int4 needs groups of 32 columns at least, which {} {} is no multiple of: "
          "use int8 or fp8",
          name, width);
  }
  return group;
}

bool is_format(const std::string& name) {
  return name == "fp8" || name == "int8" || name == "int4";
}

}  // namespace

Json quantization_json(const ModelConfig& model, const std::string& format) {
  check(is_format(format), ErrorKind::invalid_argument,
        "quantization is {}: a checkpoint that is not quantised can be made fp8, int8 or int4",
        quote(format));
  const bool is_int4 = format == "int4", is_fp8 = format == "fp8";
  const Json group = is_int4 ? Json(int4_group(model)) : Json(nullptr);
  const Json weights = {{"actorder", nullptr},
                        {"block_structure", nullptr},
                        {"dynamic", false},
                        {"group_size", group},
                        {"num_bits", is_int4 ? 4 : 8},
                        {"observer", is_int4 ? "mse" : "minmax"},
                        {"observer_kwargs", Json::object()},
                        {"strategy", is_int4 ? "group" : "channel"},
                        {"symmetric", true},
                        {"type", is_fp8 ? "float" : "int"}};
  Json activations = nullptr;
  if (is_fp8) {
    activations = weights;
    activations.update({{"dynamic", true}, {"observer", nullptr}, {"strategy", "token"}});
  }
  Json ignore = Json::array({"lm_head"});
  if (model.moe) ignore.push_back("re:.*mlp\\.gate$");  // the router
  // Integers without quantised activations are packed in this format, those of 8 bits, too.
  const char* name = is_fp8 ? "float-quantized" : "pack-quantized";
  return {{"config_groups",
           {{"group_0",
             {{"format", name},
              {"input_activations", activations},
              {"output_activations", nullptr},
              {"targets", Json::array({"Linear"})},
              {"weights", weights}}}}},
          {"format", name},
          {"global_compression_ratio", nullptr},
          {"ignore", ignore},
          {"kv_cache_scheme", nullptr},
          {"quant_method", "compressed-tensors"},
          {"quantization_status", "compressed"}};
}

void choose_quantization(ModelConfig& model, const std::string& quantization, bool dequantize) {
  const bool is_auto = quantization.empty() || quantization == "auto";
  std::shared_ptr<QuantizationConfig> chosen;
  if (model.quantization) {
    check(is_auto || quantization == model.quantization->method(), ErrorKind::invalid_argument,
          "quantization is {}, but the checkpoint is quantised already, {}: leave the option out",
          quote(quantization), model.quantization->describe());
    chosen = std::make_shared<QuantizationConfig>(*model.quantization);
  } else if (!is_auto) {
    const Json json = quantization_json(model, quantization);
    chosen = std::make_shared<QuantizationConfig>(
        JsonObject(json, "quantization", ErrorKind::invalid_argument), model.warnings);
    chosen->quantise_while_loading();
  } else {
    return;
  }
  if (dequantize) chosen->dequantise_while_loading();
  model.quantization = std::move(chosen);
}

}  // namespace nanovllm
