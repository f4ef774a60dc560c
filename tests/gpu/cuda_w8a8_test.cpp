// Products of quantised rows, of sizes for which every tile is chosen (choose_w8a8.cpp; on Hopper
// E4M3's are gemm_fp8.cuh's): the bits of rows that are multiplied one by one.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "gpu/gpu_test.h"

namespace nanovllm {
namespace {

using Rows = WeightFormat::Rows;

class CudaW8a8 : public GpuTest {};

TEST_F(CudaW8a8, ARowHasTheSameBitsInEveryTile) {
  constexpr int64_t k = 640, kMost = 1030, kRepeated = 4160;
  std::vector<float> values = normal_values(kMost * k, 3);
  for (size_t i = 0; i < (kRepeated - kMost) * k; ++i) values.push_back(values[i]);
  // Tiles that are cut, and halves of them; and whole groups of 64 rows, as the tiles of many rows
  // of x want them where scales are of blocks.
  for (const int64_t n : {1040, 4096, 4112, 6144, 24592})
    for (const WeightFormat& format : {WeightFormat{WeightFormat::int8, k, Rows::token},
                                       {WeightFormat::e4m3, k, Rows::token},
                                       {WeightFormat::e4m3, k, Rows::tensor},
                                       {WeightFormat::e4m3, kRowGroup, Rows::group}}) {
      if (!gpu_->keeps(format, n, k)) continue;
      Rig rig(*gpu_);
      const Weight w = rig.quantised_weight(format, n, k, static_cast<uint32_t>(n));
      const int64_t most = n < 4000 ? kRepeated : kMost;
      const Tensor x = rig.upload(values, DType::bf16, {kRepeated, k}),
                   one = rig.empty(DType::bf16, {kMost, n}),
                   room = rig.empty(DType::bf16, {most, n}),
                   gated = rig.empty(DType::bf16, {kMost, n / 2});
      for (int64_t i = 0; i < kMost; ++i) gpu_->gemm(one.rows(i, i + 1), x.rows(i, i + 1), w);
      gpu_->silu_and_mul(gated, one);
      const auto want = rig.bytes(one), want_gated = rig.bytes(gated);
      for (const int64_t m :
           {2, 8, 9, 16, 17, 32, 33, 64, 65, 100, 128, 129, 192, 200, 256, 257, 520, 1024, 4150}) {
        if (m > most) continue;
        const int64_t first = m > kMost ? 3 : (kMost - m) / 2;
        const auto expect = [&](const std::vector<std::byte>& all, int64_t columns, bool is_gated,
                                bool in_micro_batch) {
          const Tensor y = rig.padded(std::vector<float>(static_cast<size_t>(m * columns), 7.0f),
                                      DType::bf16, m, columns, 8);
          const auto before = rig.bytes(y);
          const auto multiply = [&] {
            if (is_gated)
              gpu_->gemm_silu_and_mul(y, room.rows(0, m), x.rows(first, first + m), w);
            else
              gpu_->gemm(y, x.rows(first, first + m), w);
          };
          if (in_micro_batch)
            gpu_->run_micro_batches(2, [&](int i) { i == 1 ? multiply() : void(); });
          else
            multiply();
          const auto got = rig.bytes(y);
          const auto row = static_cast<size_t>(2 * columns), pitch = row + 16;
          for (size_t i = 0; i < static_cast<size_t>(m); ++i) {
            ASSERT_TRUE(std::equal(got.begin() + i * pitch, got.begin() + i * pitch + row,
                                   all.begin() + (static_cast<size_t>(first) + i) % kMost * row))
                << fmt::format("row {} of {}, {} x {}, {} bits, rows {}, gated {}", i, m, n, k,
                               format.numbers == WeightFormat::int8 ? "integer" : "float",
                               static_cast<int>(format.rows), is_gated)
                << (in_micro_batch ? ", in a micro-batch" : "");
            if (i + 1 < static_cast<size_t>(m)) {
              ASSERT_TRUE(std::equal(got.begin() + i * pitch + row, got.begin() + (i + 1) * pitch,
                                     before.begin() + i * pitch + row))
                  << "the gap behind row " << i;
            }
          }
        };
        for (const bool in_micro_batch : {false, true}) {
          if (in_micro_batch && m > 256) continue;
          expect(want, n, false, in_micro_batch);
          expect(want_gated, n / 2, true, in_micro_batch);
        }
      }
    }
}

}  // namespace
}  // namespace nanovllm
