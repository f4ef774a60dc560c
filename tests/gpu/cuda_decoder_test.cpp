// All layers of a decode step in one kernel, or in few, against the same layers operation by
// operation, bit for bit: the hidden states, the residual stream, and what lies in the caches
// afterwards.
#include <gtest/gtest.h>

#include "gpu/cuda_trial.h"
#include "gpu/decoder_rig.h"
#include "gpu/gpu_test.h"

namespace nanovllm {
namespace {

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

/// Skipped where the GPU has no kernel of all layers with their attention, as Hopper has.
class CudaInt4Decoder : public CudaDecoder {
 protected:
  void SetUp() override {
    CudaDecoder::SetUp();
    DecoderShape shape{"probe", 1, 256, 4, 2, 64, 256};
    shape.cache = DType::e4m3;
    if (gpu_ && !IsSkipped() && !serves(shape)) GTEST_SKIP() << "this GPU has no such kernel";
  }
};

struct Result {
  std::vector<std::vector<std::byte>> rows;  // x, then residual, of the rows with a sequence
  std::vector<std::vector<std::byte>> caches;
};

/// Runs `body(x, residual, batch)` on a fresh copy of the step's inputs.
template <class Body>
Result run(DecoderRig& decoder, const std::vector<int32_t>& contexts, int64_t max_context,
           uint32_t seed, int64_t hidden, Body&& body) {
  Rig& rig = decoder.rig;
  const int64_t rows = static_cast<int64_t>(contexts.size());
  const Batch batch = decoder.make_step(contexts, max_context, seed);
  const Tensor x = rig.empty(DType::bf16, {rows, hidden});
  const Tensor residual =
      rig.upload(normal_values(rows * hidden, seed + 1), DType::bf16, {rows, hidden});
  body(x, residual, batch);
  Result result;
  for (const Tensor& t : {x, residual})
    for (int64_t i = 0; i < rows; ++i)
      if (contexts[static_cast<size_t>(i)] > 0) result.rows.push_back(rig.bytes(t.rows(i, i + 1)));
  for (const KvCache& cache : decoder.caches)
    for (const Tensor& t : {cache.k, cache.v})
      result.caches.push_back(rig.bytes(decoder.all_of(t)));
  return result;
}

int differing(const std::vector<std::vector<std::byte>>& a,
              const std::vector<std::vector<std::byte>>& b) {
  int count = a.size() == b.size() ? 0 : 1'000'000;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) count += a[i] != b[i];
  return count;
}

const std::vector<int32_t> kContexts[] = {{1},
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
bool compare(Backend& gpu, const DecoderShape& shape, bool few_values = false) {
  DecoderRig decoder(gpu, shape, few_values);
  int compared = 0, refused = 0;
  for (const auto& contexts : kContexts) {
    constexpr int64_t kMaxContext = 2560;
    const auto seed =
        static_cast<uint32_t>(contexts.size() * 10 + static_cast<size_t>(contexts[0]));
    bool served = false;
    const Result fused =
        run(decoder, contexts, kMaxContext, seed, shape.hidden,
            [&](Tensor x, Tensor residual, const Batch& batch) {
              served = gpu.decoder_layers(x, residual, decoder.stack, decoder.caches, batch);
            });
    if (!served) {
      ++refused;
      continue;
    }
    const Result apart = run(decoder, contexts, kMaxContext, seed, shape.hidden,
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

DecoderShape with_head_norms(DecoderShape shape) {
  shape.head_norms = true;
  return shape;
}
DecoderShape qwen3_0_6b() { return with_head_norms({"Qwen3-0.6B", 3, 1024, 16, 8, 128, 3072}); }
DecoderShape qwen3_8b() { return with_head_norms({"Qwen3-8B", 2, 4096, 32, 8, 128, 12288}); }
/// Half warps of 64-wide heads; eleven blocks of k, so that a run of four does not end with them.
DecoderShape llama() {
  DecoderShape shape{"Llama", 3, 512, 8, 2, 64, 1408};
  shape.block_size = 8;
  return shape;
}
DecoderShape windows() {
  DecoderShape shape{"windows", 3, 768, 6, 1, 128, 1024};
  shape.qkv_bias = shape.other_biases = true;
  shape.rotary_dim = 64;
  shape.block_size = 64;
  shape.windows = {300, 0, 77};
  return shape;
}
DecoderShape tall() { return with_head_norms({"tall", 3, 384, 8, 1, 128, 6400}); }
DecoderShape qwen3_30b(int64_t layers) {
  DecoderShape shape = with_head_norms({"Qwen3-30B", layers, 2048, 32, 4, 128, 768});
  shape.experts = 32;
  shape.experts_per_token = 8;
  return shape;
}

TEST_F(CudaDecoder, LayersInOneKernelGiveTheBitsOfSeparateOperations) {
  EXPECT_TRUE(compare(*gpu_, qwen3_0_6b()));
  EXPECT_TRUE(compare(*gpu_, llama()));
  DecoderShape qwen2{"Qwen2-0.5B", 2, 896, 14, 2, 64, 4864};
  qwen2.qkv_bias = true;
  qwen2.block_size = 256;
  EXPECT_TRUE(compare(*gpu_, qwen2));
  EXPECT_TRUE(compare(*gpu_, windows()));
  // Tiles of 3 and 5 groups of columns, of 7, and of a whole 8 that do not divide the blocks.
  DecoderShape wide{"wide", 2, 5120, 16, 4, 128, 1088};
  wide.head_norms = true;
  EXPECT_TRUE(compare(*gpu_, wide));
  DecoderShape wider{"wider", 1, 7168, 8, 2, 128, 832};
  wider.other_biases = true;
  EXPECT_TRUE(compare(*gpu_, wider));
  EXPECT_TRUE(compare(*gpu_, with_head_norms({"tall", 3, 320, 8, 1, 128, 6400})));
  // Down is long: its first columns come while gate_up goes on.
  EXPECT_TRUE(compare(*gpu_, qwen3_8b()));
}

// Of o and down the halves of k have a chain each: in tiles that the ring holds, and longer ones.
TEST_F(CudaDecoder, LayersWithWeightsInHalvesGiveTheBitsOfSeparateOperations) {
  DecoderShape small{"halves 0.6B", 3, 1024, 16, 8, 128, 3072};
  DecoderShape large{"halves 8B", 1, 4096, 32, 8, 128, 12288};
  // Chains of 28 atoms, which no run of 16 ends with.
  DecoderShape wide{"halves wide", 1, 5120, 28, 4, 128, 7168};
  // Small ones have both halves in a tile: of two groups of columns, of three, with heads of 64.
  DecoderShape middle{"halves 1.7B", 2, 2048, 16, 8, 128, 6144};
  DecoderShape three{"halves 3B", 1, 3072, 24, 8, 128, 8192};
  DecoderShape narrow{"halves narrow", 2, 1024, 16, 4, 64, 3072};
  middle.qkv_bias = true;
  for (DecoderShape shape : {small, middle, three, narrow, large, wide}) {
    shape.in_halves = shape.head_norms = true;
    EXPECT_TRUE(compare(*gpu_, shape, true));
  }
  small.in_halves = small.head_norms = true;
  small.cache = DType::e4m3;
  EXPECT_TRUE(compare(*gpu_, small, true));
}

// Their products sum blocks of 128 of k, and rows are quantised where they become operands, with
// scales of 128 columns or of whole rows.
TEST_F(CudaDecoder, E4m3LayersGiveTheBitsOfSeparateOperations) {
  // A row of the stream has more than a vector for each thread; tiles of other heights.
  const DecoderShape wide = with_head_norms({"wide", 2, 5120, 16, 4, 128, 1152});
  for (DecoderShape shape : {qwen3_0_6b(), llama(), windows(), wide, tall(), qwen3_8b()})
    for (const auto rows : {WeightFormat::Rows::group, WeightFormat::Rows::token}) {
      shape.rows = rows;
      compare(*gpu_, shape);
    }
}

TEST_F(CudaDecoder, Int8LayersGiveTheBitsOfSeparateOperations) {
  const DecoderShape wide = with_head_norms({"wide", 2, 5120, 16, 4, 128, 1152});
  int served = 0;
  for (DecoderShape shape : {qwen3_0_6b(), llama(), windows(), wide, tall(), qwen3_8b()})
    for (const DType cache : {DType::bf16, DType::e4m3}) {
      if (cache == DType::e4m3 && shape.hidden > 2048) continue;  // the same code
      shape.rows = WeightFormat::Rows::token;
      shape.integers = true;
      shape.cache = cache;
      const bool is_served = compare(*gpu_, shape, true);
      if (!is_served && served == 0) GTEST_SKIP() << "this GPU has no such kernel";
      EXPECT_TRUE(is_served) << shape.name;
      ++served;
    }
}

// Packed weights are unpacked by the warps that multiply, those with scales of bf16 below 2^-5 and
// without zero points in fewer steps.
void compare_int4(Backend& gpu, DecoderShape shape) {
  for (const bool coarse : {true, false}) {
    if (!coarse) {
      shape.scales = DType::f16;
      shape.most_scale = 4.0f;
      shape.has_zeros = true;
    }
    shape.cache = DType::bf16;
    shape.group = 128;
    EXPECT_TRUE(compare(gpu, shape, true)) << coarse;
    shape.cache = DType::e4m3;
    if (shape.intermediate % 256 == 0 && shape.hidden % 256 == 0) shape.group = 256;
    EXPECT_TRUE(compare(gpu, shape, true)) << coarse;
  }
}

TEST_F(CudaInt4Decoder, Int4LayersGiveTheBitsOfSeparateOperations) {
  for (const DecoderShape& shape : {qwen3_0_6b(), llama(), windows()}) compare_int4(*gpu_, shape);
}

// Tiles of more heights, and a chain of nine chunks, which no stage ends with.
TEST_F(CudaInt4Decoder, Int4LayersInOtherTilesGiveTheBitsOfSeparateOperations) {
  const DecoderShape wide = with_head_norms({"wide", 2, 5120, 16, 4, 128, 1152});
  for (const DecoderShape& shape : {wide, tall()}) compare_int4(*gpu_, shape);
}

// Of o and down a warp has both halves of k at once: of tiles of one eight of rows, of two, of four
// and of five, for which more warps multiply; of chains that no stage ends with; with heads of 64.
TEST_F(CudaInt4Decoder, Int4LayersInHalvesGiveTheBitsOfSeparateOperations) {
  DecoderShape middle{"halves 1.7B", 2, 2048, 16, 8, 128, 6144};
  DecoderShape narrow{"halves narrow", 2, 1024, 16, 4, 64, 3072};
  DecoderShape wide{"halves wide", 1, 5120, 32, 4, 128, 7168};
  middle.qkv_bias = true;
  for (DecoderShape shape : {qwen3_0_6b(), middle, narrow, wide}) {
    shape.in_halves = shape.head_norms = true;
    compare_int4(*gpu_, shape);
  }
}

TEST_F(CudaInt4Decoder, LargeInt4LayersGiveTheBitsOfSeparateOperations) {
  DecoderShape large = qwen3_8b();
  large.block_size = 64;
  // More warps multiply qkv's tiles than a warpgroup has, and gate_up's, of which blocks have two.
  DecoderShape heads = with_head_norms({"many heads", 2, 1024, 64, 8, 128, 17408});
  large.in_halves = heads.in_halves = true;
  for (const DecoderShape& shape : {large, heads}) compare_int4(*gpu_, shape);
}

TEST_F(CudaInt4Decoder, MixturesOfInt4ExpertsGiveTheBitsOfSeparateOperations) {
  DecoderShape small{"int4 mixture", 3, 1024, 8, 2, 64, 256};
  small.head_norms = true;
  small.experts = 32;
  small.experts_per_token = 4;
  // Four chunks of down, two in a stage.
  DecoderShape four{"int4 four chunks", 1, 2048, 16, 4, 128, 512};
  four.experts = 64;
  four.experts_per_token = 8;
  for (DecoderShape shape : {small, four, qwen3_30b(1)}) {
    shape.group = 128;
    EXPECT_TRUE(compare(*gpu_, shape));
    if (shape.layers == 1) continue;
    shape.cache = DType::e4m3;
    EXPECT_TRUE(compare(*gpu_, shape));
  }
}

// It takes scales of at most 12 significant bits, of 128 columns or more.
TEST_F(CudaInt4Decoder, OtherInt4WeightsAreLeftToSeparateOperations) {
  const auto is_served = [&](const auto& change) {
    DecoderShape shape{"other int4", 2, 512, 8, 4, 128, 1024};
    shape.group = 128;
    change(shape);
    return serves(shape);
  };
  EXPECT_TRUE(is_served([](DecoderShape&) {}));
  for (const int64_t group : {32, 64})
    EXPECT_FALSE(is_served([&](DecoderShape& shape) { shape.group = group; }));
  EXPECT_FALSE(is_served([](DecoderShape& shape) { shape.scales = DType::f32; }));
  EXPECT_TRUE(is_served([](DecoderShape& shape) { shape.scales = DType::f16; }));
  EXPECT_TRUE(is_served([](DecoderShape& shape) { shape.most_scale = 1.0f; }));
  EXPECT_TRUE(is_served([](DecoderShape& shape) { shape.has_zeros = true; }));
}

// Keys and values of E4M3 become bf16 in the ring, and the step's own become numbers.
TEST_F(CudaDecoder, LayersOverE4m3CachesGiveTheBitsOfSeparateOperations) {
  DecoderShape fixed{"static", 3, 896, 14, 2, 64, 4864};
  fixed.qkv_bias = true;
  fixed.block_size = 256;
  fixed.static_scales = true;
  DecoderShape large = qwen3_8b();
  large.block_size = 64;
  for (DecoderShape shape : {qwen3_0_6b(), llama(), fixed, windows(), tall(), large}) {
    shape.cache = DType::e4m3;
    EXPECT_TRUE(compare(*gpu_, shape));
  }
  for (DecoderShape shape : {qwen3_0_6b(), windows(), llama()})
    for (const auto rows : {WeightFormat::Rows::group, WeightFormat::Rows::token}) {
      shape.cache = DType::e4m3;
      shape.rows = rows;
      EXPECT_TRUE(compare(*gpu_, shape));
    }
  DecoderShape mixture = qwen3_30b(1);
  mixture.cache = DType::e4m3;
  EXPECT_TRUE(compare(*gpu_, mixture));
}

TEST_F(CudaDecoder, MixturesOfExpertsGiveTheBitsOfSeparateOperations) {
  DecoderShape small{"mixture", 3, 1024, 8, 2, 64, 128};
  small.head_norms = true;
  small.experts = 32;
  small.experts_per_token = 4;
  if (!compare(*gpu_, small)) GTEST_SKIP() << "this GPU has no such kernel";
  EXPECT_TRUE(compare(*gpu_, qwen3_30b(1)));
}

TEST_F(CudaDecoder, MixturesOfE4m3ExpertsGiveTheBitsOfSeparateOperations) {
  DecoderShape small{"FP8 mixture", 3, 1024, 8, 2, 64, 256};
  small.head_norms = true;
  small.experts = 32;
  small.experts_per_token = 4;
  // Ten blocks of down: three stages at once, and two. Norms by all threads.
  DecoderShape ten{"FP8 ten blocks", 1, 1024, 16, 4, 128, 1280},
      wide{"FP8 wide mixture", 1, 4096, 16, 4, 128, 256};
  ten.experts = wide.experts = 32;
  ten.experts_per_token = wide.experts_per_token = 8;
  for (DecoderShape shape : {small, ten, wide, qwen3_30b(2)})
    for (const DType cache : {DType::bf16, DType::e4m3}) {
      if (cache == DType::e4m3 && shape.layers == 1) continue;  // the same code
      shape.rows = WeightFormat::Rows::group;
      shape.cache = cache;
      EXPECT_TRUE(compare(*gpu_, shape, shape.intermediate == 768));
    }
}

// Words say by an epoch of which layer they are. Behind the last epoch they start again, and words
// of the round before must not be taken for new ones: a step of eight rows finds those of its own
// epoch, between it and the last such step are only steps of one row.
TEST_F(CudaDecoder, EpochsMayStartAgainAtAnyStep) {
  DecoderShape shape{"epochs", 1, 512, 8, 4, 128, 1024};
  shape.head_norms = true;
  limit_cuda(*gpu_, {.last_epoch = 10});
  constexpr int kRound = 11;  // steps, of one layer
  DecoderRig decoder(*gpu_, shape);
  for (int step = 0; step < 3 * kRound + 2; ++step) {
    const std::vector<int32_t> contexts =
        step % kRound == 1 ? std::vector<int32_t>{300, 5, 700, 64, 1, 256, 33, 90}
                           : std::vector<int32_t>{40};
    const auto seed = static_cast<uint32_t>(100 + step);
    bool served = false;
    const Result fused =
        run(decoder, contexts, 700, seed, shape.hidden,
            [&](Tensor x, Tensor residual, const Batch& batch) {
              served = gpu_->decoder_layers(x, residual, decoder.stack, decoder.caches, batch);
            });
    ASSERT_TRUE(served);
    const Result apart = run(decoder, contexts, 700, seed, shape.hidden,
                             [&](Tensor x, Tensor residual, const Batch& batch) {
                               decoder.by_operation(x, residual, batch);
                             });
    ASSERT_EQ(differing(fused.rows, apart.rows), 0) << "step " << step;
    ASSERT_EQ(differing(fused.caches, apart.caches), 0) << "step " << step;
  }
}

TEST_F(CudaDecoder, AStepWhoseLaunchIsRefusedIsLeftToSeparateOperations) {
  DecoderShape shape{"refused", 2, 512, 8, 4, 128, 1024};
  DecoderRig decoder(*gpu_, shape);
  const auto serves = [&](Tensor x, Tensor residual, const Batch& batch) {
    return gpu_->decoder_layers(x, residual, decoder.stack, decoder.caches, batch);
  };
  const auto by_operation = [&](Tensor x, Tensor residual, const Batch& batch) {
    decoder.by_operation(x, residual, batch);
  };
  const Result expected = run(decoder, {70, 3}, 100, 1, shape.hidden, by_operation);
  for (const bool refused : {true, false}) {  // refused once, it is not asked for again
    limit_cuda(*gpu_, {.fails_cooperative_launches = refused});
    const Result result = run(decoder, {70, 3}, 100, 1, shape.hidden,
                              [&](Tensor x, Tensor residual, const Batch& batch) {
                                EXPECT_FALSE(serves(x, residual, batch));
                                by_operation(x, residual, batch);
                              });
    EXPECT_EQ(differing(result.rows, expected.rows), 0);
    EXPECT_EQ(differing(result.caches, expected.caches), 0);
  }
}

TEST_F(CudaDecoder, OneRecordingServesOtherLengths) {
  DecoderShape shape{"recorded", 2, 512, 8, 4, 128, 1024};
  shape.head_norms = true;
  DecoderRig decoder(*gpu_, shape);
  Rig& rig = decoder.rig;
  constexpr int64_t kMaxContext = 1500;
  const Batch recorded = decoder.make_step({10, 0}, kMaxContext, 1);
  const Tensor x = rig.empty(DType::bf16, {2, 512}), residual = rig.empty(DType::bf16, {2, 512});
  ASSERT_TRUE(gpu_->decoder_layers(x, residual, decoder.stack, decoder.caches, recorded));
  const auto graph = gpu_->capture(
      [&] { (void)gpu_->decoder_layers(x, residual, decoder.stack, decoder.caches, recorded); });
  for (const std::vector<int32_t>& contexts :
       {std::vector<int32_t>{1400, 3}, {64, 257}, {0, 900}, {1, 1}}) {
    const uint32_t seed = 5;
    const Result replayed = run(decoder, contexts, kMaxContext, seed, 512,
                                [&](Tensor y, Tensor stream, const Batch& batch) {
                                  gpu_->copy(recorded.positions, batch.positions);
                                  gpu_->copy(recorded.slot_mapping, batch.slot_mapping);
                                  gpu_->copy(recorded.context_lens, batch.context_lens);
                                  gpu_->copy(recorded.block_tables, batch.block_tables);
                                  gpu_->copy(residual, stream);
                                  graph->launch();
                                  graph->launch();  // what one leaves must not disturb the next
                                  gpu_->copy(residual, stream);
                                  graph->launch();
                                  gpu_->copy(y, x);
                                  gpu_->copy(stream, residual);
                                });
    const Result apart = run(decoder, contexts, kMaxContext, seed, 512,
                             [&](Tensor y, Tensor stream, const Batch& batch) {
                               decoder.by_operation(y, stream, batch);
                             });
    EXPECT_EQ(differing(replayed.rows, apart.rows), 0) << contexts[0];
    EXPECT_EQ(differing(replayed.caches, apart.caches), 0) << contexts[0];
  }
}

}  // namespace
}  // namespace nanovllm
