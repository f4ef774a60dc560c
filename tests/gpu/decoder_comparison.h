// All layers of a decode step in one kernel, or in few, against the same layers operation by
// operation, bit for bit: the hidden states, the residual stream, and what lies in the caches
// afterwards.
#pragma once

#include <gtest/gtest.h>

#include "gpu/decoder_rig.h"
#include "gpu/gpu_test.h"

namespace nanovllm {

/// Skipped where the GPU has no kernel of all layers.
class CudaDecoder : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (gpu_ && !serves({"probe", 1, 256, 4, 2, 64, 256}))
      GTEST_SKIP() << "this GPU has no such kernel";
  }
  bool serves(const DecoderShape& shape) {
    DecoderRig decoder(*gpu_, shape, true);
    const Batch batch = decoder.make_step({5}, 5, 1);
    const Tensor x = decoder.rig.empty(DType::bf16, {1, shape.hidden});
    return gpu_->decoder_layers(x, x, decoder.stack, decoder.caches, batch);
  }
};

struct DecoderResult {
  std::vector<std::vector<std::byte>> rows;  // x, then residual, of the rows with a sequence
  std::vector<std::vector<std::byte>> caches;
};

/// Runs `body(x, residual, batch)` on a fresh copy of the step's inputs.
template <class Body>
DecoderResult run(DecoderRig& decoder, const std::vector<int32_t>& contexts, int64_t max_context,
                  uint32_t seed, int64_t hidden, Body&& body) {
  Rig& rig = decoder.rig;
  const int64_t rows = static_cast<int64_t>(contexts.size());
  const Batch batch = decoder.make_step(contexts, max_context, seed);
  const Tensor x = rig.empty(DType::bf16, {rows, hidden});
  const Tensor residual =
      rig.upload(normal_values(rows * hidden, seed + 1), DType::bf16, {rows, hidden});
  body(x, residual, batch);
  DecoderResult result;
  for (const Tensor& t : {x, residual})
    for (int64_t i = 0; i < rows; ++i)
      if (contexts[static_cast<size_t>(i)] > 0) result.rows.push_back(rig.bytes(t.rows(i, i + 1)));
  for (const KvCache& cache : decoder.caches)
    for (const Tensor& t : {cache.k, cache.v})
      result.caches.push_back(rig.bytes(decoder.all_of(t)));
  return result;
}

inline int differing(const std::vector<std::vector<std::byte>>& a,
                     const std::vector<std::vector<std::byte>>& b) {
  int count = a.size() == b.size() ? 0 : 1'000'000;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) count += a[i] != b[i];
  return count;
}

inline const std::vector<int32_t> kContexts[] = {{1},
                                                 {17},
                                                 {256},
                                                 {1025},
                                                 {2048},
                                                 {2500},
                                                 {64, 65},
                                                 {300, 0, 1},
                                                 {255, 256, 257, 1500},
                                                 {900, 600, 1100, 0, 0, 0},
                                                 {33, 1030, 2, 777, 1281},
                                                 {7, 700, 1024, 63, 2000, 1, 513, 128},
                                                 {2500, 2559, 2049, 2300, 2111, 2047, 2402, 1999}};

/// Whether any of the steps was served.
inline bool compare(Backend& gpu, const DecoderShape& shape, bool few_values = false) {
  DecoderRig decoder(gpu, shape, few_values);
  int compared = 0, refused = 0;
  for (const auto& contexts : kContexts) {
    constexpr int64_t kMaxContext = 2560;
    const auto seed =
        static_cast<uint32_t>(contexts.size() * 10 + static_cast<size_t>(contexts[0]));
    bool served = false;
    const DecoderResult fused =
        run(decoder, contexts, kMaxContext, seed, shape.hidden,
            [&](Tensor x, Tensor residual, const Batch& batch) {
              served = gpu.decoder_layers(x, residual, decoder.stack, decoder.caches, batch);
            });
    if (!served) {
      ++refused;
      continue;
    }
    const DecoderResult apart = run(decoder, contexts, kMaxContext, seed, shape.hidden,
                                    [&](Tensor x, Tensor residual, const Batch& batch) {
                                      decoder.by_operation(x, residual, batch);
                                    });
    EXPECT_EQ(differing(fused.rows, apart.rows), 0)
        << shape.name << ", " << contexts.size() << " rows, context " << contexts[0];
    EXPECT_EQ(differing(fused.caches, apart.caches), 0)
        << shape.name << ", caches, " << contexts.size() << " rows, context " << contexts[0];
    compared += static_cast<int>(fused.rows.size());
  }
  std::printf("  %-12s %d rows compared; %d of %d steps refused\n", shape.name, compared, refused,
              static_cast<int>(std::size(kContexts)));
  return compared > 0;
}

// Shapes of several tests.

inline DecoderShape with_head_norms(DecoderShape shape) {
  shape.head_norms = true;
  return shape;
}
inline DecoderShape qwen3_0_6b() {
  return with_head_norms({"Qwen3-0.6B", 3, 1024, 16, 8, 128, 3072});
}
inline DecoderShape qwen3_8b() { return with_head_norms({"Qwen3-8B", 2, 4096, 32, 8, 128, 12288}); }
/// Half warps of 64-wide heads; eleven blocks of k, so that a run of four does not end with them.
inline DecoderShape llama() {
  DecoderShape shape{"Llama", 3, 512, 8, 2, 64, 1408};
  shape.block_size = 8;
  return shape;
}
inline DecoderShape windows() {
  DecoderShape shape{"windows", 3, 768, 6, 1, 128, 1024};
  shape.qkv_bias = shape.other_biases = true;
  shape.rotary_dim = 64;
  shape.block_size = 64;
  shape.windows = {300, 0, 77};
  return shape;
}
inline DecoderShape tall() { return with_head_norms({"tall", 3, 384, 8, 1, 128, 6400}); }
inline DecoderShape qwen3_30b(int64_t layers) {
  DecoderShape shape = with_head_norms({"Qwen3-30B", layers, 2048, 32, 4, 128, 768});
  shape.experts = 32;
  shape.experts_per_token = 8;
  return shape;
}

}  // namespace nanovllm
