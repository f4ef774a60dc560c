// Frequencies and angles are rounded to f32 exactly where transformers rounds them
// (modeling_rope_utils.py): at large positions the angle's own rounding shows in the logits.
// Constants that are Python floats there are doubles here until they meet a tensor.
#include "layers/rotary_embedding.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace nanovllm {
namespace {

int64_t rotary_dim(const RopeParameters& rope, int64_t head_dim) {
  return static_cast<int64_t>(static_cast<double>(head_dim) * rope.partial_rotary_factor) / 2 * 2;
}

/// theta^(2i / dim): positions per radian of pair i, without any scaling.
std::vector<float> periods(const RopeParameters& rope, int64_t dim) {
  std::vector<float> values(static_cast<size_t>(dim / 2));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = std::pow(static_cast<float>(rope.theta),
                         static_cast<float>(2 * i) / static_cast<float>(dim));
  return values;
}

/// Llama 3.1: long waves are stretched by the factor, short ones are left alone, and those between
/// are interpolated.
float llama3_frequency(const RopeParameters& rope, float frequency) {
  const auto context = static_cast<double>(rope.original_max_position_embeddings);
  const auto factor = static_cast<float>(rope.factor);
  const float wavelength = 1.0f / frequency * static_cast<float>(2 * std::numbers::pi);
  if (wavelength > static_cast<float>(context / rope.low_freq_factor)) return frequency / factor;
  if (wavelength < static_cast<float>(context / rope.high_freq_factor)) return frequency;
  const float smooth =
      (1.0f / wavelength * static_cast<float>(context) - static_cast<float>(rope.low_freq_factor)) /
      static_cast<float>(rope.high_freq_factor - rope.low_freq_factor);
  return (1.0f - smooth) * frequency / factor + smooth * frequency;
}

/// YaRN (Peng et al., arXiv 2309.00071): pairs that turn more than beta_fast times within the
/// original context keep their frequency, those that turn less than beta_slow times are stretched,
/// and a linear ramp over the pairs lies between.
std::vector<float> yarn_frequencies(const RopeParameters& rope, int64_t dim) {
  const auto context = static_cast<double>(rope.original_max_position_embeddings);
  const auto pair_that_turns = [&](double times) {
    return static_cast<double>(dim) * std::log(context / (times * 2 * std::numbers::pi)) /
           (2 * std::log(rope.theta));
  };
  double low = pair_that_turns(rope.beta_fast), high = pair_that_turns(rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(dim - 1));
  if (low == high) high += 0.001;

  std::vector<float> values = periods(rope, dim);
  for (size_t i = 0; i < values.size(); ++i) {
    const float ramp =
        (static_cast<float>(i) - static_cast<float>(low)) / static_cast<float>(high - low);
    const float kept = 1.0f - std::clamp(ramp, 0.0f, 1.0f);
    const float stretched = 1.0f / (static_cast<float>(rope.factor) * values[i]);
    values[i] = stretched * (1.0f - kept) + 1.0f / values[i] * kept;
  }
  return values;
}

}  // namespace

std::vector<float> inverse_frequencies(const RopeParameters& rope, int64_t dim) {
  if (rope.type == RopeType::yarn) return yarn_frequencies(rope, dim);
  std::vector<float> values = periods(rope, dim);
  for (float& value : values) {
    value = 1.0f / value;
    if (rope.type == RopeType::linear) value /= static_cast<float>(rope.factor);
    if (rope.type == RopeType::llama3) value = llama3_frequency(rope, value);
  }
  return values;
}

size_t RotaryEmbedding::bytes(const RopeParameters& rope, int64_t head_dim, int64_t max_position) {
  return static_cast<size_t>(max_position * rotary_dim(rope, head_dim)) * sizeof(float);
}

RotaryEmbedding::RotaryEmbedding(Backend& ops, const RopeParameters& rope, int64_t head_dim,
                                 int64_t max_position) {
  // Up to that context, dynamic is default. Beyond it transformers rotates each key by the length
  // that the text had when the key entered the cache: a function of how the text was cut into
  // steps, which no engine that shares and recomputes blocks can repeat.
  check(rope.type != RopeType::dynamic || max_position <= rope.original_max_position_embeddings,
        ErrorKind::model,
        "config.json: rope type dynamic is exact only up to max_position_embeddings {}: "
        "max_model_len is {}; beyond, keys would depend on how the text was cut into steps",
        rope.original_max_position_embeddings, max_position);
  const int64_t dim = rotary_dim(rope, head_dim), half = dim / 2;
  const std::vector<float> frequencies = inverse_frequencies(rope, dim);
  const auto scale = static_cast<float>(rope.attention_factor);
  std::vector<float> table(static_cast<size_t>(max_position * dim));
  for (int64_t i = 0; i < half; ++i)
    for (int64_t position = 0; position < max_position; ++position) {
      const float angle = static_cast<float>(position) * frequencies[static_cast<size_t>(i)];
      const auto wide = static_cast<double>(angle);
      float* row = table.data() + position * dim;
      row[i] = static_cast<float>(std::cos(wide)) * scale;
      row[half + i] = static_cast<float>(std::sin(wide)) * scale;
    }
  buffer_ = ops.allocate(table.size() * sizeof(float));
  cos_sin_ = Tensor(buffer_.get(), DType::f32, {max_position, dim}, ops.device());
  const Tensor host(table.data(), DType::f32, {max_position, dim});
  ops.load(cos_sin_, {&host, 1});
  ops.synchronize();
}

}  // namespace nanovllm
