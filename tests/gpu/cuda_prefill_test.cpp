// The attention kernels that take batches of many rows, Hopper's and the one for other GPUs,
// against those that take the same rows in small pieces: the bytes are the same.
#include <cmath>

#include <gtest/gtest.h>

#include "gpu/gpu_test.h"

namespace nanovllm {
namespace {

using Part = PagedSequences::Part;

struct Shape {
  int64_t heads, kv_heads, head_dim, block, window;
};

class CudaPrefill : public GpuTest {
 protected:
  /// The rows of `parts` at once, and in pieces of at most `piece` rows, over caches of bf16 and of
  /// E4M3; elements of queries are about as large as `spread`.
  void compare(const Shape& shape, const std::vector<int>& lengths, const std::vector<Part>& parts,
               int piece, uint32_t seed, float spread = 4.0f) {
    for (const bool e4m3 : {false, true})
      compare_over(e4m3, shape, lengths, parts, piece, seed, spread);
  }

 private:
  void compare_over(bool e4m3, const Shape& shape, const std::vector<int>& lengths,
                    const std::vector<Part>& parts, int piece, uint32_t seed, float spread) {
    Rig rig(*gpu_);
    const PagedSequences paged(rig, DType::bf16, shape.block, shape.kv_heads, shape.head_dim,
                               lengths, seed, e4m3);
    int64_t tokens = 0;
    for (const Part& part : parts) tokens += part.end - part.begin;
    const auto values = normal_values(tokens * shape.heads * shape.head_dim, seed + 500, spread);
    const Tensor q = rig.upload(values, DType::bf16, {tokens, shape.heads, shape.head_dim}),
                 whole = rig.empty(DType::bf16, {tokens, shape.heads, shape.head_dim}),
                 pieces = rig.empty(DType::bf16, {tokens, shape.heads, shape.head_dim});
    const float scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
    gpu_->attention(whole, q, paged.cache, paged.batch(rig, parts), scale, shape.window);
    int64_t row = 0;
    for (const Part& part : parts)
      for (int begin = part.begin; begin < part.end; begin += piece) {
        const int end = std::min(begin + piece, part.end);
        gpu_->attention(pieces.rows(row, row + end - begin), q.rows(row, row + end - begin),
                        paged.cache, paged.batch(rig, {{part.sequence, begin, end}}), scale,
                        shape.window);
        row += end - begin;
      }
    const auto a = rig.bytes(whole), b = rig.bytes(pieces);
    const size_t head = static_cast<size_t>(shape.head_dim) * size_of(DType::bf16);
    int different = 0;
    for (size_t at = 0; at < a.size(); at += head)
      different += std::memcmp(a.data() + at, b.data() + at, head) != 0;
    EXPECT_EQ(different, 0) << "of " << a.size() / head << " rows: heads " << shape.heads << "/"
                            << shape.kv_heads << ", head_dim " << shape.head_dim << ", block "
                            << shape.block << ", window " << shape.window << ", seed " << seed
                            << ", spread " << spread << (e4m3 ? ", over e4m3" : "");
  }
};

TEST_F(CudaPrefill, HasTheBitsOfTheOtherKernels) {
  uint32_t seed = 1;
  for (const Shape& shape :
       {Shape{16, 8, 128, 64, 0}, Shape{8, 8, 128, 16, 0}, Shape{16, 4, 128, 256, 0},
        Shape{32, 4, 128, 16, 100}, Shape{21, 7, 128, 8, 700}, Shape{8, 8, 64, 64, 0},
        Shape{16, 8, 64, 16, 0}, Shape{32, 4, 64, 256, 64}, Shape{14, 2, 64, 32, 1}}) {
    std::mt19937 random(seed);
    std::vector<int> lengths;
    std::vector<Part> parts;
    const int64_t wanted = 140 * 128 / shape.heads;  // more items than the GPU has SMs
    for (int64_t tokens = 0; tokens < wanted || parts.size() < 8;) {
      const int length = 1 + static_cast<int>(random() % 1500),
                begin =
                    random() % 2 ? 0 : static_cast<int>(random() % static_cast<unsigned>(length)),
                end = random() % 4 ? length : begin + 1;
      parts.push_back({static_cast<int>(lengths.size()), begin, end});
      lengths.push_back(end);
      tokens += end - begin;
    }
    compare(shape, lengths, parts, 61, seed++);
  }
}

// Where no score moves its row's base, where most do, and where a base is so large that rounding
// decides.
TEST_F(CudaPrefill, HasTheBitsOfTheOtherKernelsForScoresOfAnySize) {
  for (const float spread : {0.25f, 16.0f, 1e5f, 1e7f})
    compare({16, 8, 128, 64, 0}, {1500, 700, 900}, {{0, 0, 1500}, {1, 0, 700}, {2, 0, 900}}, 61, 77,
            spread);
}

TEST_F(CudaPrefill, TakesManyShortSequencesAndOneLong) {
  std::vector<int> lengths;
  std::vector<Part> parts;
  for (int s = 0; s < 300; ++s) {
    lengths.push_back(s == 170 ? 3000 : 1 + s * 7 % 90);
    parts.push_back({s, s == 170 ? 1000 : lengths.back() - 1, lengths.back()});
  }
  compare({16, 8, 128, 16, 0}, lengths, parts, 64, 77);
}

}  // namespace
}  // namespace nanovllm
