// Sums over the ranks whose norm quantises rows for the product that reads them, against the
// operations that define them, bit for bit.
#include <limits>

#include "gpu/rig.h"
#include "ranks/gpu_ranks.h"

namespace nanovllm {
namespace {

using Rows = WeightFormat::Rows;

/// The product of the ranks' sum, normalised, of rows of k. `sends`: a product of such a weight
/// gives the parts of the sum, and sends them. Several times over, and in a graph.
void expect_product_of_sum(Backend& backend, Communicator& comm, ThreadGroup& group,
                           const WeightFormat& format, int64_t rows, int64_t k, bool sends) {
  constexpr int64_t n = 64, kDepth = 640;
  Rig rig(backend);
  const auto seed = static_cast<uint32_t>(comm.rank());
  const auto weight = [&](int64_t outputs, int64_t columns, uint32_t of) {
    WeightFormat own = format;
    if (own.rows != Rows::group) own.group = columns;
    return rig.quantised_weight(own, outputs, columns, of);
  };
  const Weight reader = weight(n, k, 7), first = weight(k, kDepth, seed);
  std::vector<float> parts = normal_values(rows * k, seed),
                     inputs = normal_values(rows * kDepth, 10 + seed);
  if (rows > 1)
    parts[static_cast<size_t>(k + 200)] = inputs[kDepth + 200] =
        std::numeric_limits<float>::infinity();
  const Tensor part = rig.upload(parts, DType::bf16, {rows, k}),
               stream = rig.upload(normal_values(rows * k, 99), DType::bf16, {rows, k}),
               norm = rig.upload(normal_values(k, 98), DType::bf16, {k}),
               input = rig.upload(inputs, DType::bf16, {rows, kDepth}),
               x = rig.empty(DType::bf16, {rows, k}), residual = rig.empty(DType::bf16, {rows, k}),
               y = rig.empty(DType::bf16, {rows, n});
  group.barrier(comm.rank());  // memory comes and goes while no kernel waits
  const auto sum = [&](bool fused) {
    if (!sends)
      backend.copy(x, part);
    else if (!fused)
      backend.gemm(x, input, first);
    else
      EXPECT_TRUE(comm.fusions().gemm_for_sum(x, input, first)) << rows << " rows to " << k;
    if (fused) {
      EXPECT_TRUE(comm.fusions().all_reduce_add_rms_norm(x, residual, norm, 1e-6f, reader));
    } else {
      comm.all_reduce(x);
      backend.add_rms_norm(x, residual, x, norm, 1e-6f);
    }
    backend.gemm(y, x, reader);
  };
  const auto run = [&](const std::function<void()>& body) {
    backend.copy(residual, stream);
    body();
    return std::pair{rig.bytes(y), rig.bytes(residual)};
  };
  const auto expected = run([&] { sum(false); });
  const auto check_one = [&](const std::function<void()>& body) {
    EXPECT_TRUE(run(body) == expected)
        << rows << " rows of " << k << ", numbers " << int(format.numbers) << ", scales "
        << int(format.rows) << (sends ? ", sent" : "") << ", rank " << comm.rank();
  };
  for (int again = 0; again < 3; ++again) check_one([&] { sum(true); });
  const auto graph = backend.capture([&] { sum(true); });
  for (int again = 0; again < 3; ++again) check_one([&] { graph->launch(); });
  group.barrier(comm.rank());
}

TEST(CudaQuantisedSums, GiveTheProductTheBitsOfSeparateOperations) {
  if (devices_for(2).empty()) GTEST_SKIP() << "no two cuda devices here";
  const std::vector<WeightFormat> formats{{WeightFormat::int8, 0, Rows::token},
                                          {WeightFormat::e4m3, 0, Rows::token},
                                          {WeightFormat::e4m3, 0, Rows::tensor},
                                          {WeightFormat::e4m3, kRowGroup, Rows::group}};
  for (const int world : {2, 4}) {
    const auto devices = devices_for(world);
    if (devices.empty()) break;
    on_ranks(devices, [&](Backend& backend, Communicator& comm, ThreadGroup& group) {
      for (const WeightFormat& format : formats) {
        if (!backend.keeps({format.numbers, kRowGroup, format.rows}, kRowGroup, kRowGroup))
          continue;
        // One vector a thread and two, rows that are no whole warps; several rows to a block.
        for (const int64_t k : {384, 1024, 2560, 5120, 8192})
          for (const int64_t rows :
               {int64_t{1}, int64_t{9}, k == 1024 ? int64_t{300} : int64_t{40}})
            expect_product_of_sum(backend, comm, group, format, rows, k, false);
        // Tiles of every width.
        for (const int64_t k : {2048, 4096})
          for (const int64_t rows : {97, 130, 256})
            expect_product_of_sum(backend, comm, group, format, rows, k, true);
      }
    });
  }
}

}  // namespace
}  // namespace nanovllm
