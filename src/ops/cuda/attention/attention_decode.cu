// The decode step's attention: its plan and its launch (attention_decode.cuh).
#include <algorithm>

#include "ops/cuda/attention/attention_decode.cuh"
#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/core/micro_batches.h"
#include "ops/cuda/rowwise/rotary.cuh"

namespace nanovllm {
namespace {

/// Blocks of an SM over E4M3 and for heads of 64, at most: a key takes half the time of one of bf16
/// and 128 elements, and its arithmetic as long, so that the warps of one block wait for one
/// another too long. For heads of 128 where a second unit would else begin when the first ends.
constexpr int kMostDecodeBlocks = 2;

/// Whether a step has work for so many blocks. Over E4M3 two only divide pairs of a sequence and a
/// KV head where there are fewer of these than blocks; those of 64 elements gain, too, as soon as
/// one block of an SM would have a second unit, and those of 128 as long as no block has two.
template <int kHeadDim, class C>
bool fills_most_blocks(int64_t pairs, int64_t keys, int num_sms) {
  const int64_t units = pairs * ceil_div(keys, int64_t{kChunk});
  if constexpr (kHeadDim == 64) return units > num_sms;
  if constexpr (kHeadDim == 128 && !is_e4m3<C>)
    return units > num_sms && units <= kMostDecodeBlocks * num_sms;
  return is_e4m3<C> && decode_blocks(kHeadDim) > 1 && pairs >= kMostDecodeBlocks * num_sms;
}

/// Where things lie in the memory of plans: the counters, then the plans.
struct PlanMemory {
  int* counters;
  DecodeShare* first;
  size_t most_shares;
  PlanMemory(std::byte* data, int num_sms)
      : counters(reinterpret_cast<int*>(data)),
        most_shares(static_cast<size_t>(kMostDecodeBlocks * num_sms)) {
    const auto lines = static_cast<size_t>(ceil_div(kMostDecodeBlocks * num_sms, 64));
    first = reinterpret_cast<DecodeShare*>(data + lines * 256);
  }
  DecodeShare* shares(size_t plan) const { return first + plan * most_shares; }
};

/// Bytes of a ring that keep memory busy. More only makes the SMs compete, and leaves no room for
/// the kernel after this one.
constexpr size_t kRingBytes = size_t{128} << 10;
/// A little more than half of what an SM has, so that no SM gets two blocks while another has none:
/// as the kernel before this one ends, its SMs do not become free in turn.
constexpr size_t kLeastSharedBytes = size_t{115} << 10;

/// The stages of a ring of so many bytes, or 0 where too few fit into a block's shared memory.
template <int kHeadDim, int kRows, class C>
int stages_in(size_t ring_bytes, size_t shared_bytes) {
  constexpr size_t kTile = sizeof(DecodeTile<kHeadDim, C>),
                   kFixed = sizeof(DecodeExchange<kHeadDim, kRows, C>);
  const int wanted =
      std::clamp(static_cast<int>(ring_bytes / kTile), kFewestDecodeStages, kDecodeStages);
  const int fit = shared_bytes < kFixed ? 0 : static_cast<int>((shared_bytes - kFixed) / kTile);
  return fit < kFewestDecodeStages ? 0 : std::min(fit, wanted);
}

DecodeMaps maps_of(EncodeMap encoder, const KvCache& cache, int block_shift) {
  const int many = box_keys(block_shift, true), few = box_keys(block_shift, false);
  const auto map = [&](const Tensor& half, int keys) {
    return cache_map(encoder, half, keys, CU_TENSOR_MAP_L2_PROMOTION_NONE);
  };
  return {map(cache.k, many), map(cache.v, many), map(cache.k, few), map(cache.v, few)};
}

}  // namespace

void CudaBackend::begin_step(const Batch& batch) {
  micro_batch_->step = batch.context_lens.data;
  micro_batch_->step_plans.clear();
}

/// The plan for a batch, by its number. `is_new`: it is made by a kernel just launched.
size_t CudaBackend::plan_decode(const PlanKey& key, bool& is_new) {
  is_new = false;
  for (size_t i = 0; i < micro_batch_->step_plans.size(); ++i)
    if (micro_batch_->step_plans[i] == key) return i;
  is_new = true;
  // Plans that no step remembers share the last place.
  const bool remember =
      key.context_lens == micro_batch_->step && micro_batch_->step_plans.size() + 1 < kMaxPlans;
  const size_t plan = remember ? micro_batch_->step_plans.size() : kMaxPlans - 1;
  if (remember) micro_batch_->step_plans.push_back(key);
  const PlanMemory memory(micro_batch_->plans.get(), num_sms_);
  launch(attention_plan_kernel, 1, kPlanThreads, plan_shared_bytes(key.num_seqs),
         PlanArguments{.cu_seqlens_q = reinterpret_cast<const int*>(key.cu_seqlens_q),
                       .context_lens = reinterpret_cast<const int*>(key.context_lens),
                       .num_seqs = static_cast<int>(key.num_seqs),
                       .kv_heads = static_cast<int>(key.kv_heads),
                       .window = static_cast<int>(key.window),
                       .shares = static_cast<int>(key.shares),
                       .max_slots = static_cast<int>(key.max_slots),
                       .block_tables = reinterpret_cast<const int*>(key.block_tables),
                       .table_stride = key.table_stride,
                       .block_shift = static_cast<int>(key.block_shift),
                       .share = memory.shares(plan)});
  return plan;
}

/// In a decode step a row's position is its sequence's last.
bool CudaBackend::takes_raw_heads(const Tensor& q, const RawHeads& raw, const KvCache& cache,
                                  const Batch& batch) const {
  const int64_t d = q.shape[2], rotary_dim = raw.cos_sin.shape[1];
  const HeadNorms& norms = raw.norms;
  return code_architecture_ < 90 && q.dtype == DType::bf16 && batch.is_decode() &&
         (d == 64 || d == 128) && rotary_dim % 16 == 0 &&
         wide_rows({q, raw.k, raw.v, cache.k, cache.v, raw.cos_sin}) &&
         (!norms.q.defined() || wide_rows({norms.q, norms.k}));
}

bool CudaBackend::fused_rope_store_attention(Tensor out, Tensor q, Tensor k, Tensor v,
                                             const HeadNorms& norms, const Batch& batch,
                                             Tensor cos_sin, KvCache cache, float scale,
                                             int64_t window) {
  check_fused("rope_store_attention", q, k, v, batch, cos_sin, cache);
  check_attention(out, q, cache, window);
  const RawHeads raw{k, v, cos_sin, norms};
  return q.numel() > 0 && takes_raw_heads(q, raw, cache, batch) &&
         attention_decode(out, q, cache, batch, scale, window, &raw);
}

/// False, and nothing done, if the batch or the GPU is none for the decode kernel.
bool CudaBackend::attention_decode(Tensor out, Tensor q, KvCache cache, const Batch& batch,
                                   float scale, int64_t window, const RawHeads* raw) {
  auto arguments = attention_arguments<bf16>(out, q, cache, batch, scale, window);
  const int64_t head_dim = q.shape[2], slot_bytes = arguments.group * (head_dim + 2) * 4;
  if (batch.max_seqlen_q != 1 || arguments.group > kDecodeRows ||
      kMostDecodeBlocks * num_sms_ > kPlanThreads || arguments.num_seqs > kMaxPlanSeqs)
    return false;
  const DecodeMaps maps =
      encode_map_ ? maps_of(encode_map_, cache, arguments.block_shift) : DecodeMaps{};
  const int64_t longest =
      window > 0 ? std::min(window, batch.max_context_len) : batch.max_context_len;
  bool served = false;
  const auto run = [&]<int kHeadDim, int kRows, class C>() {
    const int64_t pairs = arguments.num_seqs * cache.k.shape[1];
    const bool has_most = is_hopper_ && !runs_micro_batches_ &&
                          fills_most_blocks<kHeadDim, C>(pairs, longest, num_sms_);
    const int blocks = has_most ? kMostDecodeBlocks : 1;
    const int stages = stages_in<kHeadDim, kRows, C>(kRingBytes / blocks, max_shared_bytes_);
    const int64_t shares = blocks * (num_sms_ - (divides_sms() ? other_sms_ : 0));
    if (stages == 0) return;
    // An even number: behind their sums the outputs are aligned.
    const int64_t max_slots = static_cast<int64_t>(kPartialBytes) / slot_bytes / 2 * 2;
    bool is_new = false;
    const size_t plan = plan_decode({.cu_seqlens_q = batch.cu_seqlens_q.data,
                                     .context_lens = batch.context_lens.data,
                                     .block_tables = batch.block_tables.data,
                                     .table_stride = arguments.table_stride,
                                     .block_shift = arguments.block_shift,
                                     .num_seqs = arguments.num_seqs,
                                     .kv_heads = cache.k.shape[1],
                                     .window = arguments.window,
                                     .shares = shares,
                                     .max_slots = max_slots},
                                    is_new);
    const PlanMemory memory(micro_batch_->plans.get(), num_sms_);
    arguments.partial_sum = reinterpret_cast<float2*>(partial_results());
    arguments.partial_out =
        reinterpret_cast<float*>(arguments.partial_sum + max_slots * arguments.group);
    const DecodeWork work{.share = memory.shares(plan),
                          .counters = memory.counters,
                          .kv_heads = static_cast<int>(cache.k.shape[1]),
                          .stages = stages,
                          .lets_next_wait = runs_micro_batches_};
    const size_t shared_bytes =
        std::max(static_cast<size_t>(stages) * sizeof(DecodeTile<kHeadDim, C>) +
                     sizeof(DecodeExchange<kHeadDim, kRows, C>),
                 std::min(divides_sms() ? kOverlapAttentionBytes : kLeastSharedBytes / blocks,
                          max_shared_bytes_));
    served = true;
    if constexpr (kHeadDim == 64 || kHeadDim == 128) {
      if (raw) {
        auto heads = fused_arguments<bf16, C>(q, raw->k, raw->v, batch, raw->cos_sin, cache);
        if (raw->norms.q.defined()) {
          heads.q_norm = device_ptr<bf16>(raw->norms.q);
          heads.k_norm = device_ptr<bf16>(raw->norms.k);
          heads.eps = raw->norms.eps;
        }
        return launch(attention_raw_heads_kernel<kHeadDim, kRows, C>, grid_size(shares),
                      kDecodeThreads + kHeadWarps * kWarp, shared_bytes, arguments, work, heads);
      }
    }
    // The first kernel after the plan waits for all that went before: the later ones count on it,
    // and on old keys. Where this step makes those, too, every kernel waits.
    launch_with(attention_decode_kernel<kHeadDim, kRows, C>, grid_size(shares), kDecodeThreads,
                shared_bytes, can_launch_early_ && !is_new && batch.is_decode(), arguments, work,
                maps);
  };
  const auto run_rows = [&]<int kHeadDim, class C>() {
    if (arguments.group <= kDecodeRows / 2)
      run.template operator()<kHeadDim, 1, C>();
    else
      run.template operator()<kHeadDim, 2, C>();
  };
  dispatch_head_dim(head_dim, [&]<int kHeadDim>() {
    if (cache.k.dtype == DType::e4m3)
      run_rows.template operator()<kHeadDim, E4m3>();
    else
      run_rows.template operator()<kHeadDim, __nv_bfloat16>();
  });
  return served;
}

}  // namespace nanovllm
