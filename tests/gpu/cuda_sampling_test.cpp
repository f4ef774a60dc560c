// Sampling that never writes its logits: the tokens must be those of the product and the sampling
// one after the other.
#include <cmath>
#include <random>

#include <gtest/gtest.h>

#include "gpu/gpu_test.h"

namespace nanovllm {
namespace {

class CudaSampling : public GpuTest {};

/// Parameters of rows, all sorts of them: greedy, cold, hot, seeded in 64 bits.
struct Rules {
  SamplingBatch batch;
  Rules(Rig& rig, int64_t rows, bool greedy) {
    constexpr float kTemperatures[] = {0.6f, 1.0f, 0.0f, 2.5f, 0.05f, 1e-30f, 0.6f};
    std::vector<float> temperature, ones(static_cast<size_t>(rows), 1.0f),
        zeros(static_cast<size_t>(rows));
    std::vector<int32_t> top_k(static_cast<size_t>(rows)), position;
    std::vector<int64_t> seed;
    for (int64_t i = 0; i < rows; ++i) {
      temperature.push_back(
          greedy ? 0.0f : kTemperatures[static_cast<size_t>(i) % std::size(kTemperatures)]);
      seed.push_back((i * 7919 + 1) << (i % 40));
      position.push_back(static_cast<int32_t>(i * i));
    }
    batch = {rig.upload(temperature, DType::f32, {rows}),
             rig.upload(std::span<const int32_t>(top_k), {rows}),
             rig.upload(ones, DType::f32, {rows}),
             rig.upload(zeros, DType::f32, {rows}),
             rig.upload(std::span<const int64_t>(seed), {rows}),
             rig.upload(std::span<const int32_t>(position), {rows})};
    batch.features = greedy ? 0u : uint32_t{kSampleRandom};
  }
  /// Three rows in four get a mask of their own, which allows nearly all tokens, few, or one.
  void constrain(Rig& rig, int64_t rows, int64_t vocab) {
    const int64_t words = (vocab + 31) / 32;
    std::vector<int32_t> mask_rows, masks;
    int32_t num_masks = 0;
    std::minstd_rand random(7);
    for (int64_t i = 0; i < rows; ++i) {
      mask_rows.push_back(i % 4 == 0 ? -1 : num_masks++);
      if (i % 4 == 0) continue;
      const auto begin = masks.insert(masks.end(), static_cast<size_t>(words), i % 4 == 1 ? -1 : 0);
      const auto flip = [&](int64_t id) {
        begin[id / 32] =
            static_cast<int32_t>(static_cast<uint32_t>(begin[id / 32]) ^ 1u << id % 32);
      };
      if (i % 4 == 3)
        flip(i % 8 == 3 ? vocab - 1 : static_cast<int64_t>(random()) % vocab);
      else
        for (int64_t id = static_cast<int64_t>(random() % 3); id < vocab;
             id += 1 + static_cast<int64_t>(random() % 9))
          flip(id);
    }
    batch.token_mask = rig.upload(std::span<const int32_t>(mask_rows), {rows});
    batch.token_masks = rig.upload(std::span<const int32_t>(masks), {num_masks, words});
    batch.features |= kSampleConstrained;
  }
};

struct HeadSize {
  int64_t vocab, k;
  float spread;  // of the weights: of the logits, times the root of k
};

/// The tokens of a product and of a sampling, and of both at once.
void compare(Backend& gpu, const HeadSize& size, Weight w, int64_t rows, bool greedy,
             bool broken = false, bool constrained = false) {
  Rig rig(gpu);
  std::vector<float> values = normal_values(rows * size.k, static_cast<uint32_t>(rows));
  if (broken) {
    values[0] = NAN;
    values[static_cast<size_t>(rows / 2 * size.k)] = INFINITY;
  }
  const Tensor x = rig.upload(values, DType::bf16, {rows, size.k}),
               logits = rig.empty(DType::f32, {rows, size.vocab}),
               want = rig.empty(DType::i32, {rows}), got = rig.empty(DType::i32, {rows});
  Rules rules(rig, rows, greedy);
  gpu.gemm(logits, x, w);
  if (constrained) {
    rules.constrain(rig, rows, size.vocab);
    gpu.apply_token_masks(logits, rules.batch.token_mask, rules.batch.token_masks);
  }
  gpu.sample(want, logits, rules.batch);
  ASSERT_TRUE(gpu.fused_gemm_sample(got, x, w, rules.batch)) << "no kernel";
  EXPECT_TRUE(rig.bytes(got) == rig.bytes(want))
      << rows << " rows, " << size.vocab << " tokens, k " << size.k << (greedy ? ", greedy" : "")
      << (broken ? ", broken" : "") << (constrained ? ", constrained" : "");
}

TEST_F(CudaSampling, WithoutLogitsGivesTheTokensOfLogits) {
  for (const HeadSize& size : {HeadSize{33024, 1024, 0.02f},
                               {151936, 64, 0.4f},
                               {4112, 192, 0.0f},
                               {1008, 128, 0.2f},
                               {16, 64, 0.1f}}) {
    Rig rig(*gpu_);
    const Weight w = rig.weight(normal_values(size.vocab * size.k, 2, size.spread), DType::bf16,
                                size.vocab, size.k);
    for (const int64_t rows : {1, 7, 16, 33, 64, 65, 100, 112, 128, 129, 160, 200, 256})
      compare(*gpu_, size, w, rows, false);
    for (const int64_t rows : {5, 150}) {
      compare(*gpu_, size, w, rows, true);
      compare(*gpu_, size, w, rows, false, true);
      compare(*gpu_, size, w, rows, true, true);
    }
    for (const int64_t rows : {2, 16, 64, 129, 256})
      for (const bool greedy : {false, true})
        for (const bool broken : {false, true}) compare(*gpu_, size, w, rows, greedy, broken, true);
  }
}

/// Logits that grow from token to token, so that every one is better than all before it.
TEST_F(CudaSampling, WithoutLogitsFindsALaterTokenThatIsBetter) {
  constexpr int64_t kVocab = 8192, kDepth = 64;
  Rig rig(*gpu_);
  std::vector<float> values(static_cast<size_t>(kVocab * kDepth));
  for (int64_t i = 0; i < kVocab; ++i)
    for (int64_t j = 0; j < kDepth; ++j)
      values[static_cast<size_t>(i * kDepth + j)] = static_cast<float>(i >> (j % 2 * 8)) * 1e-3f;
  const Weight w = rig.weight(values, DType::bf16, kVocab, kDepth);
  for (const int64_t rows : {3, 90, 256}) compare(*gpu_, {kVocab, kDepth, 0}, w, rows, false);
}

}  // namespace
}  // namespace nanovllm
