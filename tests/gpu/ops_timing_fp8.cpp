// The part of ops_timing that multiplies rows of 8-bit numbers by such weights, at the shapes of
// Qwen3-8B and -32B: products alone, and a layer's in a row, whose norms know their readers or do
// not.
#include <array>

#include "gpu/timing.h"

namespace nanovllm {
namespace {

struct Product {
  const char* name;
  int64_t n, k;
};
struct Shape {
  const char* name;
  int64_t hidden, queries, inner;
  int64_t qkv() const { return queries + 2 * 8 * 128; }
  std::array<Product, 4> products() const {
    return {{{"qkv", qkv(), hidden},
             {"o", hidden, queries},
             {"gate_up", 2 * inner, hidden},
             {"down", hidden, inner}}};
  }
};

/// E4M3 in blocks of 128 x 128, or integers with scales of rows.
WeightFormat format_of(bool integers, int64_t k) {
  using Rows = WeightFormat::Rows;
  return integers ? WeightFormat{WeightFormat::int8, k, Rows::token}
                  : WeightFormat{WeightFormat::e4m3, kRowGroup, Rows::group};
}

/// Weights that one after the other are more than the L2 cache holds. Only their addresses matter.
std::vector<Weight> some_weights(Rig& rig, std::vector<Buffer>& memory, bool integers, int64_t n,
                                 int64_t k) {
  const WeightFormat format = format_of(integers, k);
  QuantizedRows rows;
  std::mt19937 random(7);
  for (int64_t i = 0; i < n * k; i += 4)
    for (uint32_t bits = static_cast<uint32_t>(random()), j = 0; j < 4; ++j, bits >>= 8)
      rows.numbers.push_back(static_cast<int8_t>((bits & 0x7f) == 0x7f ? 0 : bits & 0xff));
  rows.scales.assign(static_cast<size_t>(n * format.groups(k)), 1e-4f);
  std::vector<Weight> weights;
  for (int64_t bytes = 0; bytes < int64_t{300} << 20; bytes += n * k) {
    memory.push_back(rig.backend.allocate(rig.backend.weight_bytes(format, n, k)));
    weights.push_back(rig.backend.weight_view(memory.back().get(), format, n, k));
    rig.backend.load_quantised(weights.back(), rows);
  }
  return weights;
}

void time_rows(Backend& gpu, const Shape& shape, bool integers) {
  if (!gpu.keeps(format_of(integers, 4096), 4096, 4096)) return;
  Rig rig(gpu);
  std::vector<Buffer> memory;
  std::array<std::vector<Weight>, 4> w;
  const auto products = shape.products();
  for (size_t i = 0; i < products.size(); ++i)
    w[i] = some_weights(rig, memory, integers, products[i].n, products[i].k);
  std::printf(
      "%s, %s: microseconds of products (rows quantised first), and of a layer's with its "
      "norms, which do not know their readers, and do\n",
      integers ? "int8" : "E4M3 in blocks", shape.name);
  for (const int64_t m : {1, 16, 32, 64, 96, 128, 192, 256, 1024, 16384}) {
    const auto take = [&](int64_t columns) {  // the same 64 rows over and over
      const Tensor t = rig.empty(DType::bf16, {m, columns}),
                   some = rig.upload(normal_values(64 * columns, 3), DType::bf16, {64, columns});
      for (int64_t row = 0; row < m; row += 64) {
        const int64_t rows = std::min<int64_t>(64, m - row);
        gpu.copy(t.rows(row, row + rows), some.rows(0, rows));
      }
      return t;
    };
    const Tensor hidden = take(shape.hidden), stream = take(shape.hidden), qkv = take(shape.qkv()),
                 queries = qkv.cols(0, shape.queries), act = take(shape.inner),
                 room = rig.empty(DType::bf16, {m, 2 * shape.inner}),
                 norm = rig.upload(normal_values(shape.hidden, 4), DType::bf16, {shape.hidden});
    std::printf("  m %5ld", static_cast<long>(m));
    const auto product = [&](size_t i, int at, Tensor y, Tensor from) {
      const Weight& weight = w[i][static_cast<size_t>(at) % w[i].size()];
      if (i == 2)
        gpu.gemm_silu_and_mul(y, room, from, weight);
      else
        gpu.gemm(y, from, weight);
    };
    const std::array<Tensor, 4> to{qkv, hidden, act, hidden}, from{stream, queries, stream, act};
    for (size_t i = 0; i < 4; ++i)
      std::printf("  %s %.2f", products[i].name, microseconds(gpu, m > 1024 ? 3 : 24, [&](int at) {
                    product(i, at, to[i], from[i]);
                  }));
    for (const bool knows : {false, true})
      std::printf("  %s %.2f", knows ? "with readers" : "layer",
                  microseconds(gpu, m > 1024 ? 3 : 24, [&](int at) {
                    const auto reader = [&](size_t i) {
                      return knows ? w[i][static_cast<size_t>(at) % w[i].size()] : Weight{};
                    };
                    gpu.add_rms_norm(hidden, stream, hidden, norm, 1e-6f, reader(0));
                    product(0, at, qkv, hidden);
                    product(1, at, hidden, queries);
                    gpu.add_rms_norm(hidden, stream, hidden, norm, 1e-6f, reader(2));
                    product(2, at, act, hidden);
                    product(3, at, hidden, act);
                  }));
    std::printf("\n");
    std::fflush(stdout);
  }
}

}  // namespace

void time_fp8(Backend& gpu) {
  for (const Shape& shape :
       {Shape{"Qwen3-8B", 4096, 4096, 12288}, {"Qwen3-32B", 5120, 8192, 25600}})
    for (const bool integers : {false, true}) time_rows(gpu, shape, integers);
}

}  // namespace nanovllm
