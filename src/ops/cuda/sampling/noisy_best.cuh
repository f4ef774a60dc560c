// The argmax of logit / T + Gumbel noise, exactly, without computing most of the noise: nearly all
// tokens are ruled out by bounds of a few instructions.
#pragma once

#include "ops/cuda/sampling/row_scan.cuh"
#include "ops/noise.h"

namespace nanovllm {

constexpr float kInfinity = __builtin_huge_valf();
constexpr float kLog2E = 1.44269504f;

/// How one row is sampled.
struct RowRule {
  float temperature = 0.0f, top_p = 1.0f, min_p = 0.0f;
  int top_k = 0;  // 0: off
  uint64_t seed = 0;
  uint32_t position = 0;

  __device__ bool filtered() const {
    return temperature > 0.0f && (top_k > 0 || top_p < 1.0f || min_p > 0.0f);
  }
  __device__ bool top_p_alone() const { return top_k == 0 && top_p < 1.0f; }
};

/// How each row is sampled that nothing filters. Where all_greedy, there is nothing to read.
struct RowRules {
  const float* temperature = nullptr;
  const int64_t* seed = nullptr;
  const int* position = nullptr;
  bool all_greedy = false;
  // Of each row its mask among `masks`, or -1; a mask has so many words of 32 tokens each.
  const int* mask_rows = nullptr;
  const int* masks = nullptr;
  int mask_words = 0;

  /// Bits of the tokens that may come; null: all may.
  __device__ const int* mask_of(int row) const {
    const int mask = mask_rows ? mask_rows[row] : -1;
    return mask < 0 ? nullptr : masks + int64_t{mask} * mask_words;
  }
  __device__ RowRule of(int row) const {
    RowRule rule;
    if (all_greedy) return rule;
    rule.temperature = temperature[row];
    rule.seed = static_cast<uint64_t>(seed[row]);
    rule.position = static_cast<uint32_t>(position[row]);
    return rule;
  }
};

/// The random bits of one token, from those of its group of four.
__device__ inline uint32_t bits_of(const Philox4& bits, int id) {
  const int lane = id % 4;
  return lane == 0 ? bits.x[0] : lane == 1 ? bits.x[1] : lane == 2 ? bits.x[2] : bits.x[3];
}
__device__ inline uint32_t largest(const Philox4& bits) {
  return max(max(bits.x[0], bits.x[1]), max(bits.x[2], bits.x[3]));
}
/// The same of four values, where an index would need memory.
__device__ inline float value_of(const Vec<float>& x, int at) {
  return at == 0 ? x.v[0] : at == 1 ? x.v[1] : at == 2 ? x.v[2] : x.v[3];
}
__device__ inline float gumbel_of(uint32_t bits) { return -logf(-logf(noise_uniform(bits))); }
__device__ inline uint64_t noisy_key(float logit, int id, uint32_t bits, float temperature) {
  return rank_key(logit / temperature + gumbel_of(bits), id);
}

/// Rules out the tokens that cannot win against a score that some token has: -log(-log(u)) > c only
/// if 1 - u < exp(-c). A test in f32 with room for its roundings; where numbers are beyond it, the
/// scale is NaN and nothing is ruled out.
struct Bar {
  float score = -kInfinity, scale, offset = 0.0f;

  __device__ explicit Bar(float temperature) : scale(kLog2E / temperature) {
    if (!isfinite(scale)) scale = __int_as_float(0x7fffffff);
  }
  /// With an offset found before.
  __device__ Bar(float scale, float offset) : scale(scale), offset(offset) {}
  __device__ void raise(float other) {
    score = fmaxf(score, other);
    offset = offset_of(score);
    if (!isfinite(offset)) scale = __int_as_float(0x7fffffff);
  }
  static __device__ float offset_of(float score) {
    return kLog2E * (0.01f + 1e-6f * fabsf(score) - score);
  }
  /// Bounds of a token's score, times log2(e): -log(1 - u) >= -log(-log(u)) > log(u / (1 - u)).
  __device__ float upper(float logit, uint32_t bits) const {
    return fmaf(logit, scale, -__log2f(1.0f - noise_uniform(bits)));
  }
  __device__ float lower(float logit, uint32_t bits) const {
    return upper(logit, bits) + __log2f(noise_uniform(bits));
  }
  /// log2 of the room that is left for a token: 1 - u must be less than its power of two.
  __device__ float room(float logit) const { return fmaf(logit, scale, offset); }
  /// No noise makes up for less than this.
  static __device__ bool hopeless(float room) { return room < -24.01f; }
  static __device__ bool passes(float room, uint32_t bits) {
    float most;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(most) : "f"(room));
    // u, less half a unit of its 23 bits: as a subnormal number they are scaled without conversion.
    return !(fmaf(__uint_as_float(bits >> 9), 0x1p126f, most) < 1.0f - 0x1p-24f);
  }
};
static_assert(kMaxGumbel * kLog2E < 24.01f);

/// Best key by logit / T + noise among the tiles that one warp visits. Scores are computed last: a
/// lane holds on to the token that may be the best, until a bound of its score is below the bar.
class NoisyBest {
 public:
  /// `first_id`: of the row's first token, a multiple of 4.
  __device__ NoisyBest(const RowRule& r, int first_id)
      : rule_(r), bar_(r.temperature), first_id_(first_id) {}
  __device__ void visit(const Tile& tile, int index, float maximum) {
    const float top = maximum / rule_.temperature;
    if (!isfinite(top)) return;  // nothing to find here, or the row is greedy after all
    if (top + kMinGumbel > bar_.score) bar_.raise(top + kMinGumbel);
    if (Bar::hopeless(bar_.room(maximum))) return;
#pragma unroll
    for (int i = 0; i < kTileVectors; i += 2)
      visit(tile.v[i], first_id_ + Tile::id(index, i), tile.v[i + 1],
            first_id_ + Tile::id(index, i + 1));
  }
  __device__ uint64_t best() {
    settle();
    return warp_max_key(best_);
  }

 private:
  /// Two groups of four tokens at a time: they share the round keys of their random bits.
  __device__ void visit(const Vec<float>& a, int id_a, const Vec<float>& b, int id_b) {
    const float most_a = max_of(a), most_b = max_of(b);
    const bool any = !Bar::hopeless(bar_.room(most_a)) || !Bar::hopeless(bar_.room(most_b));
    if (!__any_sync(kFullMask, any)) return;
    const Philox4 bits_a = noise_bits(rule_.seed, rule_.position, static_cast<uint32_t>(id_a) / 4),
                  bits_b = noise_bits(rule_.seed, rule_.position, static_cast<uint32_t>(id_b) / 4);
    // First as if all four had the largest logit and the best noise of them.
    const bool pass = Bar::passes(bar_.room(most_a), largest(bits_a)) ||
                      Bar::passes(bar_.room(most_b), largest(bits_b));
    if (!fresh_ && !__any_sync(kFullMask, pass)) return;
    fresh_ = false;
    float lower = -kInfinity;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      lower = fmaxf(lower, fmaxf(bar_.lower(a.v[j], bits_a.x[j]), bar_.lower(b.v[j], bits_b.x[j])));
    lower = float_of(__reduce_max_sync(kFullMask, order_of(lower))) * (1.0f / kLog2E);
    lower -= 0.01f + 1e-6f * fabsf(lower);
    if (lower > bar_.score) bar_.raise(lower);
    unsigned left = 0;  // a bit per token that may still win
#pragma unroll
    for (int j = 0; j < 4; ++j)
      left |= static_cast<unsigned>(Bar::passes(bar_.room(a.v[j]), bits_a.x[j])) << j |
              static_cast<unsigned>(Bar::passes(bar_.room(b.v[j]), bits_b.x[j])) << (4 + j);
    for (; left != 0; left &= left - 1) {
      const int at = __ffs(static_cast<int>(left)) - 1;
      const bool in_a = at < 4;
      settle();
      held_logit_ = in_a ? value_of(a, at) : value_of(b, at - 4);
      held_id_ = in_a ? id_a + at : id_b + at - 4;
      held_bits_ = in_a ? bits_of(bits_a, at) : bits_of(bits_b, at - 4);
    }
    __syncwarp();
  }
  /// Computes the score of the held token, if it may still be the best.
  __device__ void settle() {
    if (held_id_ >= 0 && Bar::passes(bar_.room(held_logit_), held_bits_)) {
      const uint64_t key = noisy_key(held_logit_, held_id_, held_bits_, rule_.temperature);
      best_ = key > best_ ? key : best_;
    }
    held_id_ = -1;
  }
  const RowRule& rule_;
  Bar bar_;
  int first_id_;
  uint64_t best_ = 0;
  bool fresh_ = true;
  float held_logit_ = 0.0f;
  int held_id_ = -1;
  uint32_t held_bits_ = 0;
};

}  // namespace nanovllm
