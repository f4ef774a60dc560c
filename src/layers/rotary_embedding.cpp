#include "layers/rotary_embedding.h"

#include <cmath>

namespace nanovllm {
namespace {

int64_t rotary_dim(const RopeParameters& rope, int64_t head_dim) {
  return static_cast<int64_t>(static_cast<double>(head_dim) * rope.partial_rotary_factor) / 2 * 2;
}

}  // namespace

size_t RotaryEmbedding::bytes(const RopeParameters& rope, int64_t head_dim, int64_t max_position) {
  return static_cast<size_t>(max_position * rotary_dim(rope, head_dim)) * sizeof(float);
}

// Frequencies and angles are rounded to f32 exactly where transformers rounds them
// (modeling_rope_utils.py): at large positions the angle's own rounding shows in the logits.
RotaryEmbedding::RotaryEmbedding(Backend& ops, const RopeParameters& rope, int64_t head_dim,
                                 int64_t max_position) {
  check(rope.type == RopeType::standard, ErrorKind::model,
        "config.json: rope type {} is not supported; supported: default", name_of(rope.type));
  const int64_t dim = rotary_dim(rope, head_dim), half = dim / 2;
  std::vector<float> table(static_cast<size_t>(max_position * dim));
  for (int64_t i = 0; i < half; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(dim);
    const float inv_freq = 1.0f / std::pow(static_cast<float>(rope.theta), exponent);
    for (int64_t position = 0; position < max_position; ++position) {
      const double angle = static_cast<double>(static_cast<float>(position) * inv_freq);
      table[static_cast<size_t>(position * dim + i)] = static_cast<float>(std::cos(angle));
      table[static_cast<size_t>(position * dim + half + i)] = static_cast<float>(std::sin(angle));
    }
  }
  buffer_ = ops.allocate(table.size() * sizeof(float));
  cos_sin_ = Tensor(buffer_.get(), DType::f32, {max_position, dim}, ops.device());
  const Tensor host(table.data(), DType::f32, {max_position, dim});
  ops.load(cos_sin_, {&host, 1});
  ops.synchronize();
}

}  // namespace nanovllm
