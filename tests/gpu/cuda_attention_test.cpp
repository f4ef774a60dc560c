// Exactness of attention on the GPU, bit for bit: a row's result depends on its own sequence alone,
// whatever computes it: decode steps, chunks or whole prompts, in any company, over blocks of any
// size.
#include <map>
#include <span>

#include <gtest/gtest.h>

#include "gpu/gpu_test.h"

namespace nanovllm {
namespace {

class CudaAttention : public GpuTest {};

using Part = PagedSequences::Part;

/// Attention over several cuts of the same sequences; every row's bytes are kept by (sequence,
/// position) and must never change.
class RowBook {
 public:
  RowBook(Rig& rig, const PagedSequences& paged, DType dtype, int64_t heads, uint32_t seed,
          int64_t window)
      : rig_(rig), paged_(paged), dtype_(dtype), heads_(heads), seed_(seed), window_(window) {}
  void run(const std::vector<Part>& parts) {
    const int64_t width = heads_ * paged_.head_dim;
    std::vector<float> values;
    for (const Part& p : parts) {
      const auto& q = queries(p.sequence);
      values.insert(values.end(), q.begin() + p.begin * width, q.begin() + p.end * width);
    }
    const int64_t tokens = static_cast<int64_t>(values.size()) / width;
    const Tensor q = rig_.upload(values, dtype_, {tokens, heads_, paged_.head_dim}),
                 out = rig_.empty(dtype_, {tokens, heads_, paged_.head_dim});
    rig_.backend.attention(out, q, paged_.cache, paged_.batch(rig_, parts),
                           1.0f / std::sqrt(static_cast<float>(paged_.head_dim)), window_);
    const auto bytes = rig_.bytes(out);
    const size_t row = static_cast<size_t>(width) * size_of(dtype_);
    size_t at = 0;
    for (const Part& p : parts)
      for (int position = p.begin; position < p.end; ++position, at += row) {
        const std::vector<std::byte> now(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                                         bytes.begin() + static_cast<std::ptrdiff_t>(at + row));
        const auto [place, is_new] = book_.try_emplace({p.sequence, position}, now);
        if (!is_new) {
          ++compared;
          different += place->second != now;
        }
      }
  }
  const std::map<std::pair<int, int>, std::vector<std::byte>>& rows() const { return book_; }
  int compared = 0, different = 0;

 private:
  const std::vector<float>& queries(int s) {
    auto& q = queries_[s];
    if (q.empty())
      q = normal_values(paged_.lengths[static_cast<size_t>(s)] * heads_ * paged_.head_dim,
                        seed_ + 1000 + static_cast<uint32_t>(s), 2.0f);
    return q;
  }
  Rig& rig_;
  const PagedSequences& paged_;
  DType dtype_;
  int64_t heads_;
  uint32_t seed_;
  int64_t window_;
  std::map<int, std::vector<float>> queries_;
  std::map<std::pair<int, int>, std::vector<std::byte>> book_;
};

struct AttentionShape {
  DType dtype;
  int64_t heads, kv_heads, head_dim, window = 0;
  bool e4m3 = false;  // the cache
};

void cut_in_many_ways(RowBook& book, const std::vector<int>& lengths) {
  std::vector<Part> whole;
  for (int s = 0; s < static_cast<int>(lengths.size()); ++s)
    whole.push_back({s, 0, lengths[static_cast<size_t>(s)]});
  book.run(whole);
  for (const Part& p : whole) book.run({p});  // alone
  for (const int chunk : {1, 17, 64, 100, 256, 300}) {
    for (const Part& p : whole) {
      if (chunk == 1 && p.end > 300) continue;
      for (int begin = 0; begin < p.end; begin += chunk)
        book.run({{p.sequence, begin, std::min(begin + chunk, p.end)}});
    }
  }
  // Decode: the last rows of all sequences together, and beside a prefill chunk.
  for (const int back : {1, 2, 3, 40}) {
    std::vector<Part> step;
    for (const Part& p : whole)
      if (p.end >= back) step.push_back({p.sequence, p.end - back, p.end - back + 1});
    book.run(step);
    step.insert(step.begin(), {static_cast<int>(lengths.size()) - 1, 0, lengths.back()});
    book.run(step);
  }
  // So many that sequences are not split.
  std::vector<Part> crowd;
  for (int i = 0; i < 600; ++i) {
    const Part& p = whole[static_cast<size_t>(i) % whole.size()];
    const int at = p.end - 1 - (i / static_cast<int>(whole.size())) % p.end;
    crowd.push_back({p.sequence, at, at + 1});
  }
  book.run(crowd);
}

void expect_same_rows(Backend& gpu, std::span<const AttentionShape> shapes) {
  for (const AttentionShape& shape : shapes) {
    const std::vector<int> lengths = shape.dtype == DType::f32
                                         ? std::vector<int>{1, 65, 300}
                                         : std::vector<int>{1, 7, 64, 65, 255, 256, 257, 700, 1500};
    std::map<std::pair<int, int>, std::vector<std::byte>> first;
    int compared = 0, different = 0;
    for (const int64_t block : {8, 16, 64, 256}) {
      Rig rig(gpu);
      const PagedSequences paged(rig, shape.dtype, block, shape.kv_heads, shape.head_dim, lengths,
                                 77, shape.e4m3);
      RowBook book(rig, paged, shape.dtype, shape.heads, 77, shape.window);
      if (block == 16)
        cut_in_many_ways(book, lengths);
      else {
        std::vector<Part> whole;
        for (int s = 0; s < static_cast<int>(lengths.size()); ++s)
          whole.push_back({s, 0, lengths[static_cast<size_t>(s)]});
        book.run(whole);
      }
      compared += book.compared;
      different += book.different;
      if (first.empty()) first = book.rows();
      for (const auto& [key, bytes] : book.rows()) {
        ++compared;
        different += bytes != first.at(key);
      }
    }
    EXPECT_EQ(different, 0);
    EXPECT_GT(compared, 1000);
    std::printf("  attention %s%s heads %2ld/%ld d %3ld window %3ld: %d rows of %d differ\n",
                std::string(name_of(shape.dtype)).c_str(), shape.e4m3 ? " over e4m3" : "",
                static_cast<long>(shape.heads), static_cast<long>(shape.kv_heads),
                static_cast<long>(shape.head_dim), static_cast<long>(shape.window), different,
                compared);
  }
}

TEST_F(CudaAttention, RowsDoNotDependOnCompanyChunksOrBlocks) {
  const AttentionShape shapes[] = {
      {DType::bf16, 16, 8, 128},      {DType::bf16, 8, 8, 64},      {DType::bf16, 10, 2, 80},
      {DType::bf16, 6, 2, 96},        {DType::bf16, 8, 1, 256},     {DType::f32, 4, 2, 64},
      {DType::bf16, 16, 1, 128},      {DType::bf16, 24, 2, 64},     {DType::bf16, 20, 1, 64},
      {DType::bf16, 16, 8, 128, 100}, {DType::bf16, 16, 1, 80, 300}};
  expect_same_rows(*gpu_, shapes);
}

TEST_F(CudaAttention, RowsOverE4m3DoNotDependOnCompanyChunksOrBlocks) {
  const AttentionShape shapes[] = {
      {DType::bf16, 16, 8, 128, 0, true}, {DType::bf16, 8, 8, 64, 0, true},
      {DType::bf16, 10, 2, 80, 0, true},  {DType::bf16, 6, 2, 96, 0, true},
      {DType::bf16, 8, 1, 256, 0, true},  {DType::f32, 4, 2, 64, 0, true},
      {DType::bf16, 16, 1, 128, 0, true}, {DType::bf16, 24, 2, 64, 0, true},
      {DType::bf16, 20, 1, 64, 0, true},  {DType::bf16, 16, 8, 128, 100, true},
      {DType::bf16, 16, 1, 80, 300, true}};
  expect_same_rows(*gpu_, shapes);
}

}  // namespace
}  // namespace nanovllm
