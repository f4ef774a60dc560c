// The kernel of all layers of a decode step, of int4 weights.
#include "gpu/decoder_comparison.h"

namespace nanovllm {
namespace {

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

// Chains of 38, of 35 and of 43 chunks.
TEST_F(CudaInt4Decoder, Int4LayersInUnevenHalvesGiveTheBitsOfSeparateOperations) {
  for (DecoderShape shape : {DecoderShape{"halves 4B", 2, 2560, 32, 8, 128, 9728},
                             DecoderShape{"halves 1.5B", 1, 1536, 12, 2, 128, 8960},
                             DecoderShape{"halves Llama 2", 1, 4096, 32, 32, 128, 11008}}) {
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

}  // namespace
}  // namespace nanovllm
