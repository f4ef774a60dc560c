// Offsets beyond 2^31 elements: nothing on the way to memory may be 32 bits wide. Skipped where
// memory is short; the CPU only ever touches the few pages it is asked for.
#include "parity/harness.h"

namespace nanovllm::parity {
namespace {

constexpr int64_t kMany = (int64_t{1} << 31) + (int64_t{1} << 20);  // elements

class LargeParity : public BackendTest {
 protected:
  /// Zeroed device memory, or null if that would leave less than 2 GB.
  Buffer room(size_t bytes) {
    if (ops().memory().free < bytes + (size_t{2} << 30)) return nullptr;
    return ops().allocate(bytes);
  }
  void upload(Tensor dst, const Values& values) {
    std::vector<bf16> host;
    for (const double value : values) host.emplace_back(static_cast<float>(value));
    ops().copy(dst, Tensor(host.data(), DType::bf16, {1, dst.numel()}));
    ops().synchronize();
  }
};

TEST_P(LargeParity, GatherRowsReachesTheLastRow) {
  constexpr int64_t n = 4096, kRows = kMany / n;
  const Buffer buffer = room(static_cast<size_t>(kRows * n) * 2);
  if (!buffer) GTEST_SKIP() << "not enough memory";
  const Tensor x(buffer.get(), DType::bf16, {kRows, n}, ops().device());
  const Values row = random_values(DType::bf16, n, 1);
  upload(x.rows(kRows - 1, kRows), row);
  const Operand y(ops(), DType::bf16, {1, n});
  ops().gather_rows(y, x, ints(ops(), {static_cast<int32_t>(kRows - 1)}));
  ops().synchronize();
  expect_equal(y.get(), row, "last row");
}

TEST_P(LargeParity, TheCachesLastBlockIsStoredAndRead) {
  constexpr int64_t kHeads = 8, kBlock = 256, d = 128, kBlocks = kMany / (kHeads * kBlock * d);
  const size_t bytes = static_cast<size_t>(kBlocks * kHeads * kBlock * d) * 2;
  const Buffer both = room(2 * bytes);
  if (!both) GTEST_SKIP() << "not enough memory";
  const KvCache cache{
      Tensor(both.get(), DType::bf16, {kBlocks, kHeads, kBlock, d}, ops().device()),
      Tensor(both.get() + bytes, DType::bf16, {kBlocks, kHeads, kBlock, d}, ops().device())};
  const Values k = random_values(DType::bf16, kHeads * d, 1),
               v = random_values(DType::bf16, kHeads * d, 2);
  const Operand k_row(ops(), DType::bf16, {1, kHeads, d}, k),
      v_row(ops(), DType::bf16, {1, kHeads, d}, v), out(ops(), DType::bf16, {1, kHeads, d});
  const Operand slots = ints(ops(), {static_cast<int32_t>((kBlocks - 1) * kBlock)}),
                starts = ints(ops(), {0, 1}), lengths = ints(ops(), {1}),
                table = ints(ops(), {static_cast<int32_t>(kBlocks - 1)});
  Batch batch;
  batch.tokens = slots;
  batch.slot_mapping = slots;
  batch.cu_seqlens_q = starts;
  batch.context_lens = lengths;
  batch.block_tables = table.view().reshape({1, 1});
  batch.max_seqlen_q = batch.max_context_len = 1;
  ops().store_kv(cache, k_row, v_row, slots);
  ops().attention(out, k_row, cache, batch, 1.0f, 0);
  ops().synchronize();
  expect_equal(out.get(), v, "attention over one key is its value");
}

NANOVLLM_PARITY_BACKENDS(LargeParity);

}  // namespace
}  // namespace nanovllm::parity
