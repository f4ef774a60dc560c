// The kernels of all layers of a decode step: of plain weights, of numbers of 8 bits, of mixtures.
#include "gpu/cuda_trial.h"
#include "gpu/decoder_comparison.h"

namespace nanovllm {
namespace {

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
  // Small ones have both halves in a tile: of two groups of columns, of three, of four, with heads
  // of 64.
  DecoderShape middle{"halves 1.7B", 2, 2048, 16, 8, 128, 6144};
  DecoderShape three{"halves 3B", 1, 3072, 24, 8, 128, 8192};
  DecoderShape four{"halves 7B", 1, 3584, 28, 4, 128, 18944};
  DecoderShape narrow{"halves narrow", 2, 1024, 16, 4, 64, 3072};
  // Behind the columns that could come early lie more than are gathered at once.
  DecoderShape longer{"halves 32B", 1, 5120, 40, 8, 128, 27648};
  middle.qkv_bias = true;
  for (DecoderShape shape : {small, middle, three, four, narrow, longer, large, wide}) {
    shape.in_halves = shape.head_norms = true;
    EXPECT_TRUE(compare(*gpu_, shape, true));
  }
  small.in_halves = small.head_norms = true;
  small.cache = DType::e4m3;
  EXPECT_TRUE(compare(*gpu_, small, true));
}

// Chains that end with shorter runs: of 76 and of 70 atoms; of 108 and of 86 in turn, whose first
// columns come while gate_up goes on: of 126 atoms of the latter, where a run of four begins.
TEST_F(CudaDecoder, LayersWithUnevenHalvesGiveTheBitsOfSeparateOperations) {
  DecoderShape uneven{"halves 4B", 2, 2560, 32, 8, 128, 9728};
  DecoderShape shorter{"halves 1.5B", 1, 1536, 12, 2, 128, 8960};
  DecoderShape odd{"halves 14B", 1, 5120, 40, 8, 128, 13824};
  DecoderShape older{"halves Llama 2", 1, 4096, 32, 32, 128, 11008};
  // Only o has halves.
  const DecoderShape whole{"o in halves", 2, 1024, 16, 8, 128, 2944};
  uneven.qkv_bias = true;
  for (DecoderShape shape : {uneven, shorter, odd, older, whole}) {
    shape.in_halves = shape.head_norms = true;
    EXPECT_TRUE(compare(*gpu_, shape, true));
  }
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

// Halves of k in a tile and in turn, of 54 blocks and of odd numbers, too.
TEST_F(CudaDecoder, E4m3LayersInHalvesGiveTheBitsOfSeparateOperations) {
  for (DecoderShape shape : {DecoderShape{"FP8 halves 0.6B", 3, 1024, 16, 8, 128, 3072},
                             {"FP8 halves 8B", 1, 4096, 32, 8, 128, 12288},
                             {"FP8 halves 14B", 1, 5120, 40, 8, 128, 13824},
                             {"FP8 halves 7B", 1, 3584, 28, 4, 128, 18944},
                             {"FP8 halves 4B", 2, 2560, 32, 8, 128, 9728},
                             {"FP8 halves narrow", 2, 1024, 16, 4, 64, 2816}})
    for (const DType cache : {DType::bf16, DType::e4m3}) {
      if (cache == DType::e4m3 && shape.layers < 2) continue;
      shape.in_halves = shape.head_norms = true;
      shape.rows = WeightFormat::Rows::group;
      shape.cache = cache;
      EXPECT_TRUE(compare(*gpu_, shape, true)) << shape.name;
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
    const DecoderResult fused =
        run(decoder, contexts, 700, seed, shape.hidden,
            [&](Tensor x, Tensor residual, const Batch& batch) {
              served = gpu_->decoder_layers(x, residual, decoder.stack, decoder.caches, batch);
            });
    ASSERT_TRUE(served);
    const DecoderResult apart = run(decoder, contexts, 700, seed, shape.hidden,
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
  const DecoderResult expected = run(decoder, {70, 3}, 100, 1, shape.hidden, by_operation);
  for (const bool refused : {true, false}) {  // refused once, it is not asked for again
    limit_cuda(*gpu_, {.fails_cooperative_launches = refused});
    const DecoderResult result = run(decoder, {70, 3}, 100, 1, shape.hidden,
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
    const DecoderResult replayed =
        run(decoder, contexts, kMaxContext, seed, 512,
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
    const DecoderResult apart = run(decoder, contexts, kMaxContext, seed, 512,
                                    [&](Tensor y, Tensor stream, const Batch& batch) {
                                      decoder.by_operation(y, stream, batch);
                                    });
    EXPECT_EQ(differing(replayed.rows, apart.rows), 0) << contexts[0];
    EXPECT_EQ(differing(replayed.caches, apart.caches), 0) << contexts[0];
  }
}

}  // namespace
}  // namespace nanovllm
