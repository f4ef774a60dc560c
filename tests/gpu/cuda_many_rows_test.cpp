// Steps of many rows take kernels of their own: large products, a warp for each row of a norm, a
// warp for each token's heads. Each must give the bytes of the kernels that few rows take. So must
// the products of steps in micro-batches, which have few SMs.
#include <gtest/gtest.h>

#include "gpu/gpu_test.h"

namespace nanovllm {
namespace {

class CudaManyRows : public GpuTest {};

struct Shape {
  int64_t m, n, k;
};

/// The operands: x, the same at an odd address, which takes the kernel that defines the order
/// of the sums, and weights [columns, k].
struct Operands {
  Tensor x, odd;
  Weight w;
  Operands(Rig& rig, const Shape& s, int64_t columns, float spread) {
    const auto values = normal_values(s.m * s.k, 1);
    x = rig.upload(values, DType::bf16, {s.m, s.k});
    odd = rig.padded(values, DType::bf16, s.m, s.k, 1);
    w = rig.weight(normal_values(columns * s.k, 2, spread), DType::bf16, columns, s.k);
  }
};
/// [m, n] within `all`, of which the rest must stay what it was.
struct Framed {
  Tensor all, inside;
  Framed(Rig& rig, const Shape& s, const std::vector<float>& before)
      : all(rig.upload(before, DType::bf16, {s.m + 1, s.n + 8})),
        inside(all.rows(0, s.m).cols(0, s.n)) {}
};
size_t framed_size(const Shape& s) { return static_cast<size_t>((s.m + 1) * (s.n + 8)); }

/// Edges on all sides of the tiles, and several tiles to a block.
TEST_F(CudaManyRows, ProductsHaveTheBitsOfTheDefinition) {
  for (const Shape& s : {Shape{900, 4000, 1088},
                         {2048, 2048, 1024},
                         {3000, 2744, 1600},
                         {16, 16896, 1024},
                         {250, 4096, 2112}}) {
    Rig rig(*gpu_);
    const Operands o(rig, s, s.n, 0.03f);
    const std::vector<float> before(framed_size(s), 7.0f);
    const Framed want(rig, s, before), got(rig, s, before);
    gpu_->gemm(want.inside, o.odd, o.w);
    gpu_->gemm(got.inside, o.x, o.w);
    EXPECT_TRUE(rig.bytes(got.all) == rig.bytes(want.all)) << s.m << " x " << s.n << " x " << s.k;
  }
}

TEST_F(CudaManyRows, GatedProductsHaveTheBitsOfTheDefinition) {
  for (const Shape& s :
       {Shape{900, 2000, 1088}, {2048, 1024, 1024}, {3000, 1400, 1600}, {200, 8448, 1024}}) {
    Rig rig(*gpu_);
    const float spread = s.m == 2048 ? 3.0f : 0.1f;  // 3: gates of several hundred
    const Operands o(rig, s, 2 * s.n, spread);
    const Tensor between = rig.empty(DType::bf16, {s.m, 2 * s.n});
    const std::vector<float> before(framed_size(s), 7.0f);
    const Framed want(rig, s, before), got(rig, s, before);
    gpu_->gemm(between, o.odd, o.w);
    gpu_->silu_and_mul(want.inside, between);
    gpu_->gemm_silu_and_mul(got.inside, between, o.x, o.w);
    EXPECT_TRUE(rig.bytes(got.all) == rig.bytes(want.all)) << s.m << " x " << s.n << " x " << s.k;
  }
}

constexpr int64_t kRowsOfMicroBatches[] = {1, 9, 24, 40, 64, 65, 100, 128, 200};

TEST_F(CudaManyRows, ProductsInMicroBatchesHaveTheBitsOfTheDefinition) {
  for (const int64_t m : kRowsOfMicroBatches)
    for (const auto& [n, k] : std::initializer_list<std::pair<int64_t, int64_t>>{
             {4096, 1024}, {1024, 2048}, {1024, 3072}, {1000, 1088}, {24, 64}}) {
      const Shape s{m, n, k};
      Rig rig(*gpu_);
      const Operands o(rig, s, n, 0.03f);
      const std::vector<float> before(framed_size(s), 7.0f);
      const Framed want(rig, s, before), one(rig, s, before), two(rig, s, before);
      gpu_->gemm(want.inside, o.odd, o.w);
      gpu_->run_micro_batches(2, [&](int i) { gpu_->gemm((i == 0 ? one : two).inside, o.x, o.w); });
      for (const Framed* got : {&one, &two})
        EXPECT_TRUE(rig.bytes(got->all) == rig.bytes(want.all)) << m << " x " << n << " x " << k;
    }
}

TEST_F(CudaManyRows, GatedProductsInMicroBatchesHaveTheBitsOfTheDefinition) {
  for (const int64_t m : kRowsOfMicroBatches)
    for (const auto& [n, k] :
         std::initializer_list<std::pair<int64_t, int64_t>>{{3072, 1024}, {1000, 1088}, {40, 64}}) {
      const Shape s{m, n, k};
      Rig rig(*gpu_);
      const Operands o(rig, s, 2 * n, 0.1f);
      const Tensor between = rig.empty(DType::bf16, {m, 2 * n});
      const std::vector<float> before(framed_size(s), 7.0f);
      const Framed want(rig, s, before), got(rig, s, before);
      gpu_->gemm(between, o.odd, o.w);
      gpu_->silu_and_mul(want.inside, between);
      gpu_->run_micro_batches(2, [&](int i) {
        if (i == 1) gpu_->gemm_silu_and_mul(got.inside, between, o.x, o.w);
      });
      EXPECT_TRUE(rig.bytes(got.all) == rig.bytes(want.all)) << m << " x " << n << " x " << k;
    }
}

constexpr int64_t kRows = 1101, kFew = 100, kSome = 300;

TEST_F(CudaManyRows, NormsHaveTheBitsOfFewRows) {
  for (const int64_t n : {1024, 2048, 2560, 4096, 5120, 1000}) {
    Rig rig(*gpu_);
    const auto values = normal_values(kRows * n, 3), stream = normal_values(kRows * n, 5);
    const Tensor x = rig.upload(values, DType::bf16, {kRows, n}),
                 w = rig.upload(normal_values(n, 4), DType::bf16, {n}),
                 many = rig.empty(DType::bf16, {kRows, n}),
                 few = rig.empty(DType::bf16, {kRows, n}),
                 many_stream = rig.upload(stream, DType::bf16, {kRows, n}),
                 few_stream = rig.upload(stream, DType::bf16, {kRows, n});
    const auto in_pieces = [&](auto&& norm) {
      for (int64_t i = 0; i < kRows;) {
        const int64_t end = std::min(i + (i < kSome ? kFew : kSome), kRows);
        norm(i, end);
        i = end;
      }
    };
    gpu_->rms_norm(many, x, w, 1e-6f);
    in_pieces([&](int64_t begin, int64_t end) {
      gpu_->rms_norm(few.rows(begin, end), x.rows(begin, end), w, 1e-6f);
    });
    EXPECT_TRUE(rig.bytes(many) == rig.bytes(few)) << "norm of width " << n;
    gpu_->add_rms_norm(many, many_stream, x, w, 1e-6f);
    in_pieces([&](int64_t begin, int64_t end) {
      gpu_->add_rms_norm(few.rows(begin, end), few_stream.rows(begin, end), x.rows(begin, end), w,
                         1e-6f);
    });
    EXPECT_TRUE(rig.bytes(many) == rig.bytes(few)) << "sum's norm of width " << n;
    EXPECT_TRUE(rig.bytes(many_stream) == rig.bytes(few_stream)) << "sum of width " << n;
    gpu_->add_rms_norm(x, few_stream, x, w, 1e-6f);  // in place
    gpu_->add_rms_norm(many, many_stream, rig.upload(values, DType::bf16, {kRows, n}), w, 1e-6f);
    EXPECT_TRUE(rig.bytes(x) == rig.bytes(many)) << "in place, width " << n;
  }
}

/// Rows of which cuBLASLt makes halves of k, and of which other kernels do; more than there is room
/// for at once; widths of all norms.
TEST_F(CudaManyRows, ANormThatAddsHalvesHasTheBitsOfSeparateOperations) {
  struct Product {
    int64_t n, k, most;
    DType dtype = DType::bf16;
  };
  for (const Product& p : {Product{1024, 3072, 1024},
                           {2560, 1024, 1024},
                           {4096, 1024, 7000},
                           {5120, 1024, 1024},
                           {8192, 1024, 300},
                           {1536, 1536, 1024},
                           {1536, 8960, 1024},
                           {1024, 1024, 40, DType::f32}}) {
    Rig rig(*gpu_);
    const Tensor all = rig.upload(normal_values(p.most * p.k, 3), p.dtype, {p.most, p.k}),
                 stream = rig.upload(normal_values(p.most * p.n, 6), p.dtype, {p.most, p.n}),
                 norm = rig.upload(normal_values(p.n, 4), p.dtype, {p.n});
    Weight w{rig.upload(normal_values(p.n * p.k, 5, 0.03f), p.dtype, {p.n, p.k}),
             p.dtype == DType::f32 ? WeightFormat::f32 : WeightFormat::bf16};
    w.format.in_halves = true;
    struct Result {
      Tensor y, stream;
    };
    const auto room = [&] {
      return Result{rig.empty(p.dtype, {p.most, p.n}), rig.empty(p.dtype, {p.most, p.n})};
    };
    const Result want = room(), got = room();
    for (const int64_t m : {1, 7, 40, 300, 1023, 1024, 7000}) {
      if (m > p.most) continue;
      const Tensor x = all.rows(0, m);
      const auto make = [&](const Result& r, auto&& run) {
        for (const Tensor& t : {r.y, r.stream}) gpu_->copy(t.rows(0, m), stream.rows(0, m));
        run(r.y.rows(0, m), r.stream.rows(0, m));
      };
      const auto compare = [&](const char* how) {
        for (Tensor Result::*part : {&Result::y, &Result::stream})
          EXPECT_TRUE(rig.bytes((got.*part).rows(0, m)) == rig.bytes((want.*part).rows(0, m)))
              << how << ", " << m << " x " << p.n << " x " << p.k;
      };
      const auto fused = [&](Tensor y, Tensor sum) {
        gpu_->gemm_add_rms_norm(y, sum, x, w, norm, 1e-6f);
      };
      make(want, [&](Tensor y, Tensor sum) {
        gpu_->Backend::gemm_add_rms_norm(y, sum, x, w, norm, 1e-6f);
      });
      make(got, fused);
      compare("alone");
      make(got, [&](Tensor y, Tensor sum) {
        gpu_->run_micro_batches(2, [&](int i) {
          if (i == 1) fused(y, sum);
        });
      });
      compare("in a micro-batch");
    }
  }
}

struct HeadsShape {
  int64_t heads, kv_heads, head_dim, rotary_dim;
  bool e4m3 = false;  // the cache
};

/// Queries, keys and values as the projection leaves them, on their way into a cache.
struct HeadsRig {
  static constexpr int64_t kBlock = 16, kBlocks = 200;
  HeadsShape shape;
  Tensor qkv, q_norm, k_norm, cos_sin, positions, slots;
  KvCache cache;

  HeadsRig(Rig& rig, const HeadsShape& s, int64_t rows = kRows) : shape(s) {
    const int64_t width = (s.heads + 2 * s.kv_heads) * s.head_dim;
    qkv = rig.upload(normal_values(rows * width, 6), DType::bf16, {rows, width});
    q_norm = rig.upload(normal_values(s.head_dim, 7), DType::bf16, {s.head_dim});
    k_norm = rig.upload(normal_values(s.head_dim, 8), DType::bf16, {s.head_dim});
    cos_sin = rig.upload(normal_values(64 * s.rotary_dim, 9), DType::f32, {64, s.rotary_dim});
    std::vector<int32_t> at, to;
    for (int64_t i = 0; i < rows; ++i) {
      at.push_back(static_cast<int32_t>(i * 7 % 64));
      to.push_back(i % 13 == 5 ? -1 : static_cast<int32_t>(i * 11 % (kBlock * kBlocks)));
    }
    positions = rig.upload(at, {rows});
    slots = rig.upload(to, {rows});
    const std::vector<float> old(static_cast<size_t>(kBlocks * s.kv_heads * kBlock * s.head_dim),
                                 3.0f);
    const auto pages = [&] {
      if (s.e4m3) return e4m3_pages(rig, {kBlocks, s.kv_heads, kBlock, s.head_dim});
      return rig.upload(old, DType::bf16, {kBlocks, s.kv_heads, kBlock, s.head_dim});
    };
    cache.k = pages();
    cache.v = pages();
  }
  /// `work`(q, k, v, batch) with the rows begin .. end - 1.
  template <class Work>
  void with(int64_t begin, int64_t end, Work&& work) const {
    Batch batch;
    batch.positions = positions.rows(begin, end);
    batch.slot_mapping = slots.rows(begin, end);
    const int64_t q_end = shape.heads * shape.head_dim,
                  k_end = q_end + shape.kv_heads * shape.head_dim;
    const Tensor rows = qkv.rows(begin, end);
    work(rows.cols(0, q_end).split(shape.head_dim), rows.cols(q_end, k_end).split(shape.head_dim),
         rows.cols(k_end, rows.shape[1]).split(shape.head_dim), batch);
  }
  void run(Backend& ops, int64_t begin, int64_t end, bool norm) const {
    with(begin, end, [&](Tensor q, Tensor k, Tensor v, const Batch& batch) {
      if (norm)
        ops.qk_norm_rope_store(q, k, v, q_norm, k_norm, 1e-6f, batch, cos_sin, cache);
      else
        ops.rope_store(q, k, v, batch, cos_sin, cache);
    });
  }
  /// The same from the product; false where there is no such kernel.
  bool run_product(Backend& ops, Tensor x, Weight w) const {
    bool done = false;
    with(0, x.shape[0], [&](Tensor q, Tensor k, Tensor v, const Batch& batch) {
      done = ops.fused_gemm_qk_norm_rope_store(qkv.rows(0, x.shape[0]), q, k, v, x, w, q_norm,
                                               k_norm, 1e-6f, batch, cos_sin, cache);
    });
    return done;
  }
  Tensor queries() const { return qkv.cols(0, shape.heads * shape.head_dim); }
};

TEST_F(CudaManyRows, HeadsHaveTheBitsOfFewRows) {
  for (const HeadsShape& shape : {HeadsShape{16, 8, 128, 128},
                                  {5, 1, 128, 64},
                                  {14, 2, 64, 64},
                                  {3, 3, 64, 32},
                                  {4, 2, 96, 96},
                                  {16, 8, 128, 128, true},
                                  {5, 1, 128, 64, true},
                                  {14, 2, 64, 64, true},
                                  {4, 2, 96, 96, true}})
    for (const bool norm : {true, false}) {
      Rig rig(*gpu_);
      const HeadsRig many(rig, shape), few(rig, shape);
      many.run(*gpu_, 0, kRows, norm);
      for (int64_t i = 0; i < kRows; i += kFew) few.run(*gpu_, i, std::min(i + kFew, kRows), norm);
      const std::string what = std::to_string(shape.heads) + " heads of " +
                               std::to_string(shape.head_dim) + (norm ? ", normalised" : "");
      EXPECT_EQ(rig.floats(many.queries()), rig.floats(few.queries())) << what;
      EXPECT_TRUE(rig.bytes(many.cache.k) == rig.bytes(few.cache.k)) << what;
      EXPECT_TRUE(rig.bytes(many.cache.v) == rig.bytes(few.cache.v)) << what;
    }
}

/// The results of two steps for x and w, and of one; `product` runs the one.
template <class Product>
void compare_heads(Backend& gpu, const HeadsShape& shape, int64_t rows, int64_t k,
                   Product&& product) {
  Rig rig(gpu);
  const HeadsRig one(rig, shape, rows), two(rig, shape, rows);
  const Tensor x = rig.upload(normal_values(rows * k, 1), DType::bf16, {rows, k});
  const Weight w =
      rig.weight(normal_values(two.qkv.shape[1] * k, 2, 0.03f), DType::bf16, two.qkv.shape[1], k);
  gpu.gemm(two.qkv, x, w);
  two.run(gpu, 0, rows, true);
  product(one, x, w);
  const std::string what = std::to_string(rows) + " rows";
  EXPECT_EQ(rig.floats(one.queries()), rig.floats(two.queries())) << what;
  EXPECT_TRUE(rig.bytes(one.cache.k) == rig.bytes(two.cache.k)) << what;
  EXPECT_TRUE(rig.bytes(one.cache.v) == rig.bytes(two.cache.v)) << what;
}

/// Products that end in heads are Hopper's, as micro-batches are.
bool makes_heads(const Backend& gpu) {
  return gpu.micro_batches_for({.rows = 256, .weight_bytes = 1e9, .cache_bytes = 1e11}) > 1;
}

TEST_F(CudaManyRows, HeadsOfAProductHaveTheBitsOfTwoSteps) {
  if (!makes_heads(*gpu_)) GTEST_SKIP() << "this GPU has no such kernel";
  const auto product = [&](const HeadsRig& rig, Tensor x, Weight w) {
    ASSERT_TRUE(rig.run_product(*gpu_, x, w)) << "no kernel of many rows";
  };
  compare_heads(*gpu_, {16, 8, 128, 128}, 2048, 1024, product);
  compare_heads(*gpu_, {15, 3, 128, 128}, 2999, 1088, product);
}

TEST_F(CudaManyRows, HeadsOfAProductInMicroBatchesHaveTheBitsOfTwoSteps) {
  if (!makes_heads(*gpu_)) GTEST_SKIP() << "this GPU has no such kernel";
  const auto product = [&](const HeadsRig& rig, Tensor x, Weight w) {
    gpu_->run_micro_batches(2, [&](int i) {
      if (i == 1) {
        ASSERT_TRUE(rig.run_product(*gpu_, x, w)) << "no kernel in micro-batches";
      }
    });
  };
  for (const int64_t rows : kRowsOfMicroBatches) {
    compare_heads(*gpu_, {16, 8, 128, 128}, rows, 1024, product);
    compare_heads(*gpu_, {5, 1, 128, 128}, rows, 192, product);
  }
}

}  // namespace
}  // namespace nanovllm
