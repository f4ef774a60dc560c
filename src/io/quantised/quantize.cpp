#include "io/quantised/quantize.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>
#include <numeric>

#include <nlohmann/json.hpp>

#include "core/check.h"
#include "io/quantised/quantization.h"
#include "io/quantised/quantized_weight.h"

namespace nanovllm {
namespace {

// Forced inline, so that every instruction set has its own code of them (quantise()).
#define NANOVLLM_INLINE [[gnu::always_inline]] inline

constexpr float kMostE4m3 = 448;
constexpr int32_t kMostE4m3Bits = 0x7e;

/// The largest magnitude; not finite where a number is not.
NANOVLLM_INLINE float largest_magnitude(const float* numbers, size_t count) {
  int32_t most = 0;
  for (size_t i = 0; i < count; ++i) {
    const int32_t bits = std::bit_cast<int32_t>(numbers[i]) & 0x7fffffff;  // as magnitudes compare
    most = bits > most ? bits : most;
  }
  return std::bit_cast<float>(most);
}

/// The nearest integer, ties to even, of a number below 2^22, or `low` or `high` where that is
/// nearer to it: kWhole and it, whose sum has no fractions. Bits of such numbers compare as they
/// do.
constexpr float kWhole = 0x1.8p23f;
NANOVLLM_INLINE int32_t whole_bits(float x, int low, int high) {
  const int32_t bits = std::bit_cast<int32_t>(x + kWhole),
                least = std::bit_cast<int32_t>(kWhole) + low,
                most = std::bit_cast<int32_t>(kWhole) + high, above = bits > least ? bits : least;
  return above < most ? above : most;
}

/// The nearest E4M3 number's bits, ties to even, of a number that rounds to 448 at most.
NANOVLLM_INLINE uint8_t to_e4m3(float x) {
  // Signed, which vectors compare without instructions of their own.
  const auto bits = std::bit_cast<int32_t>(x), magnitude = bits & 0x7fffffff;
  // From 2^-6 on three bits of the mantissa stay; below, multiples of 2^-9.
  const int32_t normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
  const int32_t subnormal = std::bit_cast<int32_t>(std::bit_cast<float>(magnitude) + 0x1p14f) & 0xf;
  const int32_t is_normal = -static_cast<int32_t>(magnitude >= std::bit_cast<int32_t>(0x1p-6f));
  const int32_t number = (normal & is_normal) | (subnormal & ~is_normal);
  return static_cast<uint8_t>((bits >> 24 & 0x80) |
                              (number < kMostE4m3Bits ? number : kMostE4m3Bits));
}

NANOVLLM_INLINE float scale_for(float largest, float most) {
  return std::max(static_cast<float>(bf16(largest / most)), kLeastScale);
}

/// The squared error of int4 under `scale`, of which `inverse` is near enough: this only chooses.
NANOVLLM_INLINE float int4_error(float x, float scale, float inverse) {
  const float error = (std::bit_cast<float>(whole_bits(x * inverse, -8, 7)) - kWhole) * scale - x;
  return error * error;
}

/// Of these shares of the largest magnitude, the one whose sum of squared errors, in a fixed order,
/// is the least; the earlier of two alike.
NANOVLLM_INLINE float int4_scale(const float* numbers, size_t count, float largest) {
  constexpr float kShares[] = {7.0f, 7.5f, 8.0f, 9.0f, 10.0f};
  constexpr size_t kCandidates = std::size(kShares), kLanes = 16;
  float scales[kCandidates], inverses[kCandidates], errors[kCandidates] = {};
  for (size_t c = 0; c < kCandidates; ++c) {
    scales[c] = scale_for(largest, kShares[c]);
    inverses[c] = 1 / scales[c];
  }
  float sums[kCandidates][kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (size_t c = 0; c < kCandidates; ++c)
#pragma GCC unroll 1  // which makes vectors of the lanes
      for (size_t lane = 0; lane < kLanes; ++lane)
        sums[c][lane] += int4_error(numbers[i + lane], scales[c], inverses[c]);
  for (size_t lane = 0; lane < kLanes; ++lane)  // all candidates' chains of additions at once
    for (size_t c = 0; c < kCandidates; ++c) errors[c] += sums[c][lane];
  for (; i < count; ++i)
    for (size_t c = 0; c < kCandidates; ++c)
      errors[c] += int4_error(numbers[i], scales[c], inverses[c]);
  size_t best = 0;
  for (size_t c = 1; c < kCandidates; ++c)
    if (errors[c] < errors[best]) best = c;
  return scales[best];
}

NANOVLLM_INLINE void to_integers(const float* numbers, size_t count, float scale, int low, int high,
                                 int middle, uint8_t* __restrict out) {
  for (size_t i = 0; i < count; ++i)
    out[i] = static_cast<uint8_t>(whole_bits(numbers[i] / scale, low, high) -
                                  std::bit_cast<int32_t>(kWhole) + middle);
}

NANOVLLM_INLINE float quantise_here(const float* numbers, size_t count, WeightFormat::Numbers to,
                                    uint8_t* __restrict out) {
  const float largest = largest_magnitude(numbers, count);
  if (!std::isfinite(largest)) return largest;
  const bool is_int4 = to == WeightFormat::int4;
  const float scale = largest == 0 ? 1
                      : is_int4    ? int4_scale(numbers, count, largest)
                                   : scale_for(largest, to == WeightFormat::e4m3 ? kMostE4m3 : 127);
  if (is_int4)
    to_integers(numbers, count, scale, -8, 7, 8, out);
  else if (to == WeightFormat::int8)
    to_integers(numbers, count, scale, -127, 127, 0, out);
  else
    for (size_t i = 0; i < count; ++i) out[i] = to_e4m3(numbers[i] / scale);
  return scale;
}

// Not of more than AVX2: a multiplication and an addition that became one would round once.
#if defined(__x86_64__)
[[gnu::target("avx2")]] float quantise_avx2(const float* numbers, size_t count,
                                            WeightFormat::Numbers to, uint8_t* out) {
  return quantise_here(numbers, count, to, out);
}
const bool kHasAvx2 = __builtin_cpu_supports("avx2");
#endif

void to_floats(const std::byte* from, const std::string& dtype, std::span<float> out) {
  if (dtype == "F32") {
    std::memcpy(out.data(), from, out.size_bytes());
  } else if (dtype == "F16") {
    for (size_t i = 0; i < out.size(); ++i) {
      f16 half;
      std::memcpy(&half.bits, from + i * sizeof half, sizeof half);
      out[i] = static_cast<float>(half);
    }
  } else {
    for (size_t i = 0; i < out.size(); ++i) {
      uint16_t bits = 0;
      std::memcpy(&bits, from + i * sizeof bits, sizeof bits);
      out[i] = std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
    }
  }
}

}  // namespace

float quantise(std::span<const float> numbers, WeightFormat::Numbers to, uint8_t* out) {
#if defined(__x86_64__)
  if (kHasAvx2) return quantise_avx2(numbers.data(), numbers.size(), to, out);
#endif
  return quantise_here(numbers.data(), numbers.size(), to, out);
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
  const auto middle = static_cast<float>(scheme_.middle());
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
      const float scale = nanovllm::quantise(numbers, to, rounded.data());
      if (!(scale < kMostScale))  // the message's parts take longer than the numbers do
        fail(ErrorKind::model, "{}: tensor {} has a number that is {} be quantised",
             checkpoint_->file_of(numbers_.name), numbers_.name,
             std::isfinite(scale) ? "too large to" : "not finite, and cannot");
      out.scales[static_cast<size_t>(r * groups_ + c / group)] = scale;
      const int64_t begin = std::max(c, block.col_begin), end = std::min(c + group, block.col_end);
      std::copy_n(rounded.begin() + (begin - c), end - begin,
                  out.numbers.begin() + r * cols + begin - block.col_begin);
    }
  return out;
}

namespace {

/// The largest group that fills the rows of all weights.
int64_t int4_group(const ModelConfig& m, const std::string& format) {
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
          "quantization {} needs groups of 32 columns at least, which {} {} is no multiple of: "
          "use int8 or fp8",
          format, name, width);
  }
  return group;
}

bool is_format(const std::string& name) {
  return name == "fp8" || name == "int8" || name == "int4" || name == "w4a8";
}

}  // namespace

Json quantization_json(const ModelConfig& model, const std::string& format) {
  check(is_format(format), ErrorKind::invalid_argument,
        "quantization is {}: a checkpoint that is not quantised can be made fp8, int8, int4 "
        "or w4a8",
        quote(format));
  const bool is_int4 = format == "int4" || format == "w4a8", is_fp8 = format == "fp8",
             is_packed = format == "int4";  // vLLM reads no other weights beside plain activations
  const Json group = is_int4 ? Json(int4_group(model, format)) : Json(nullptr);
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
  if (!is_packed) {
    activations = weights;
    activations.update({{"dynamic", true},
                        {"group_size", nullptr},
                        {"num_bits", 8},
                        {"observer", nullptr},
                        {"strategy", "token"}});
  }
  Json ignore = Json::array({"lm_head"});
  if (model.moe) ignore.push_back("re:.*mlp\\.gate$");  // the router
  const char* name = is_fp8 ? "float-quantized" : is_packed ? "pack-quantized" : "int-quantized";
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
    const std::string& method = model.quantization->method();
    // vLLM's gptq_marlin and awq_marlin name kernels for the same files.
    check(is_auto || quantization == method || quantization == method + "_marlin",
          ErrorKind::invalid_argument,
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
