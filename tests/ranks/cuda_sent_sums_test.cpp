// Products that send their results straight to the ranks that sum them, against what defines them,
// bit for bit.
#include <cstring>

#include "ranks/gpu_ranks.h"

namespace nanovllm {
namespace {

/// A row of sums: y [rows, n] of one product after another, of x [rows, k] for each k of `inputs`.
struct SentProducts {
  int64_t rows, n;
  std::vector<int64_t> inputs;
};

/// Products that go straight to the ranks that sum them, against gemm(), then all_reduce() and
/// add_rms_norm(): one after the other without a pause, as in a step, and in a graph.
void expect_sums_of_products(const SentProducts& products, Backend& backend, Communicator& comm,
                             ThreadGroup& group) {
  const auto& [rows, n, inputs] = products;
  std::vector<Buffer> memory;
  const auto take = [&](int seed, std::initializer_list<int64_t> shape) {
    Tensor t(nullptr, DType::bf16, shape, backend.device());
    t.data = memory.emplace_back(backend.allocate(t.bytes())).get();
    auto values = values_of<bf16>(seed, t.numel());
    backend.copy(t, Tensor(values.data(), DType::bf16, shape));
    backend.synchronize();
    return t;
  };
  const Tensor y = take(0, {rows, n}), residual = take(0, {rows, n}), y_two = take(0, {rows, n}),
               residual_two = take(0, {rows, n}), stream = take(99, {rows, n}),
               norm = take(98, {n});
  std::vector<Tensor> x;
  std::vector<Weight> w;
  for (const int64_t k : inputs) {
    x.push_back(take(10 + comm.rank(), {rows, k}));
    // The last row is no numbers on rank 0, by the bits that stand for an empty place.
    bf16 none;
    none.bits = 0xffff;
    if (rows > 1 && comm.rank() == 0)
      backend.copy(Tensor(x.back().rows(rows - 1, rows).data, DType::bf16, {1}, backend.device()),
                   Tensor(&none, DType::bf16, {1}));
    w.push_back({take(20 + comm.rank(), {n, k}), WeightFormat::bf16});
  }
  group.barrier(comm.rank());
  const auto sent = [&] {
    for (size_t i = 0; i < x.size(); ++i) {
      EXPECT_TRUE(comm.fusions().gemm_for_sum(y, x[i], w[i]))
          << y.describe() << " x " << w[i].data.describe();
      EXPECT_TRUE(comm.fusions().all_reduce_add_rms_norm(y, residual, norm, 1e-5F));
    }
  };
  const auto host = [&](const Tensor& t) {
    std::vector<bf16> values(static_cast<size_t>(t.numel()));
    backend.copy(Tensor(values.data(), DType::bf16, {t.shape[0], t.shape[1]}), t);
    backend.synchronize();
    return values;
  };
  const auto check_one = [&](const std::function<void()>& fused) {
    for (const Tensor& t : {residual, residual_two}) backend.copy(t, stream);
    fused();
    for (size_t i = 0; i < x.size(); ++i) {
      backend.gemm(y_two, x[i], w[i]);
      comm.all_reduce(y_two);
      backend.add_rms_norm(y_two, residual_two, y_two, norm, 1e-5F);
    }
    for (const auto& [one, two] : {std::pair(y, y_two), std::pair(residual, residual_two)}) {
      const auto got = host(one), expected = host(two);
      EXPECT_EQ(std::memcmp(got.data(), expected.data(), got.size() * sizeof(bf16)), 0)
          << y.describe() << ", rank " << comm.rank() << " of " << comm.world_size();
    }
  };
  for (int again = 0; again < 3; ++again) check_one(sent);
  const auto graph = backend.capture(sent);
  for (int again = 0; again < 3; ++again) check_one([&] { graph->launch(); });
  group.barrier(comm.rank());  // memory comes and goes while no kernel waits
}

TEST(CudaSentSums, AreThoseOfTheProductThenAllReduceWithTheNorm) {
  if (devices_for(2).empty()) GTEST_SKIP() << "no two cuda devices here";
  for (const int world : {2, 4, 8}) {
    const auto devices = devices_for(world);
    if (devices.empty()) break;
    // Both kernels that send, of large weights and others; tiles of every width; one or two vectors
    // a thread.
    std::vector<SentProducts> all;
    for (const int64_t rows : {97, 100, 128, 129, 145, 161, 200, 225, 256})
      all.push_back({rows, 4096, {4096 / world, 12288 / world, 128}});
    for (const int64_t rows : {104, 130, 255})
      for (const int64_t n : {256 * world, 6144, 8192})
        if (n % (256 * world) == 0) all.push_back({rows, n, {1024, 320}});
    on_ranks(devices, [&](Backend& backend, Communicator& comm, ThreadGroup& group) {
      for (const SentProducts& products : all)
        expect_sums_of_products(products, backend, comm, group);
    });
  }
}

}  // namespace
}  // namespace nanovllm
