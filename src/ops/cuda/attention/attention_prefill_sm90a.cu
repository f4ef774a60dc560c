// Launches the prefill kernel of Hopper (attention_prefill.cuh).
#include "ops/cuda/attention/attention_prefill.cuh"
#include "ops/cuda/core/cuda_backend.h"

namespace nanovllm {
namespace {

/// How many KV heads of how many sequences have keys and values that the L2 cache holds, for
/// sequences of `context` keys.
struct Section {
  int heads, seqs;
  Section(int64_t context, const Tensor& keys) {
    constexpr int64_t kBytes = int64_t{16} << 20;  // about a third of the cache: measured
    const auto row_bytes = static_cast<int64_t>(kv_row_bytes(keys.dtype, keys.shape[3]));
    const int64_t kv_heads = keys.shape[1], fit = kBytes / (2 * context * row_bytes);
    heads = static_cast<int>(std::clamp<int64_t>(fit, 1, kv_heads));
    seqs = static_cast<int>(std::clamp<int64_t>(fit / kv_heads, 1, kWarp));
  }
};

/// With fewer, this kernel takes their rows, too.
constexpr int64_t kFewestDecodes = 16;

/// The sequences begin .. end - 1 of a batch; rows count from its first.
Batch sequences(const Batch& batch, int64_t begin, int64_t end) {
  Batch part = batch;
  part.cu_seqlens_q = batch.cu_seqlens_q.rows(begin, end + 1);
  part.context_lens = batch.context_lens.rows(begin, end);
  part.block_tables = batch.block_tables.rows(begin, end);
  part.num_decodes = std::clamp<int64_t>(batch.num_decodes - begin, 0, end - begin);
  return part;
}

}  // namespace

bool CudaBackend::attention_prefill(Tensor out, Tensor q, KvCache cache, const Batch& batch,
                                    float scale, int64_t window) {
  if (!is_hopper_ || (q.shape[2] != 64 && q.shape[2] != 128)) return false;
  // A third of the SMs at the speed of this kernel outdo all of them at that of the other.
  if (q.shape[0] * q.shape[1] < num_sms_ / 3 * kItemRows) return false;
  // Single rows among others read as many keys as they do work: for the kernel that is made for it.
  const int64_t decodes = batch.num_decodes;
  if (decodes >= kFewestDecodes && !batch.is_decode()) {
    Batch first = sequences(batch, 0, decodes);
    first.max_seqlen_q = 1;
    if (attention_decode(out.rows(0, decodes), q.rows(0, decodes), cache, first, scale, window))
      return attention_prefill(out, q, cache, sequences(batch, decodes, batch.num_seqs()), scale,
                               window);
  }
  const int64_t kv_heads = cache.k.shape[1];
  const Section section(batch.max_context_len, cache.k);
  const PrefillArguments arguments{attention_arguments<bf16>(out, q, cache, batch, scale, window),
                                   static_cast<int>(kv_heads),
                                   static_cast<int>(ceil_div(batch.max_context_len, kTileKeys)),
                                   section.seqs,
                                   section.heads,
                                   reinterpret_cast<int*>(micro_batch_->prefill_counters.get()),
                                   reciprocal_of_group(static_cast<int>(q.shape[1] / kv_heads))};
  const auto launch_for = [&]<int kHeadDim, class C>(const CUtensorMap& k, const CUtensorMap& v) {
    using Shared = PrefillShared<kHeadDim, C>;
    static_assert(sizeof(Shared) <= 227 * 1024);
    launch_early(attention_prefill_kernel<kHeadDim, C>, static_cast<unsigned>(num_sms_),
                 kPrefillThreads<C>, sizeof(Shared), arguments, k, v);
  };
  const auto launch_of = [&]<class C>(const CUtensorMap& k, const CUtensorMap& v) {
    if (q.shape[2] == 64)
      launch_for.template operator()<64, C>(k, v);
    else
      launch_for.template operator()<128, C>(k, v);
  };
  if (cache.k.dtype == DType::e4m3) {
    launch_of.template operator()<E4m3>({}, {});
    return true;
  }
  const auto map = [&](const Tensor& half) {  // swizzled as wgmma reads it
    return cache_map(encode_map_, half, std::min<int64_t>(kTileKeys, half.shape[2]),
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
  };
  launch_of.template operator()<__nv_bfloat16>(map(cache.k), map(cache.v));
  return true;
}

}  // namespace nanovllm
