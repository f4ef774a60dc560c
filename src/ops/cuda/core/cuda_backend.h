// CudaBackend: the catalogue of ops/backend.h on one NVIDIA GPU. One op, one launch (or two), on
// one non-blocking stream (or two: run_micro_batches); nothing is allocated and nothing waits
// inside an op, so that any sequence of ops can be recorded into a graph.
#pragma once

#include <array>
#include <functional>
#include <future>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <cuda.h>

#include "ops/backend.h"
#include "ops/cuda/core/kernel_launcher.h"
#include "ops/cuda/gemm/choose.h"
#include "ops/cuda/gemm/cublaslt/gemm_algorithms.h"
#include "ops/cuda/ptx/tensor_map.h"
#include "ops/cuda_trial.h"
#include "ops/staged_load.h"

namespace nanovllm {

struct HeadsInput;  // gemm_heads.cuh
struct RowRules;    // noisy_best.cuh
struct RowScan;     // row_scan.cuh

struct ExpertPlan;
struct PeerTable;
struct SentParts;
namespace decoder {
struct Arguments;
}

class CudaBackend final : public Backend, KernelLauncher {
 public:
  /// Throws Error(device) if there is no such GPU, or not enough memory on it for the scratch.
  explicit CudaBackend(int index);
  ~CudaBackend() override;

  Device device() const override { return {Device::cuda, index_}; }
  std::string name() const override { return name_; }
  MemoryInfo memory() const override;
  Buffer allocate(size_t bytes) override;
  Buffer allocate_host(size_t bytes) override;
  void copy(Tensor dst, Tensor src) override;
  void copy_ahead(Tensor dst, Tensor src) override;
  void synchronize() override;
  bool is_asynchronous() const override { return true; }
  std::unique_ptr<Fence> make_fence() override;
  bool has_graphs() const override { return true; }
  std::unique_ptr<Graph> capture(const std::function<void()>& body) override;
  int64_t max_logits_rows() const override { return 512; }
  /// Room to unpack a weight is part of it, of the largest that weight_bytes() was asked about.
  /// Throws Error(invalid_argument) where attention() has no kernel for the size of heads.
  size_t scratch_bytes(const OperandLimits& largest) const override {
    check_head_dim(largest.head_dim);
    return kMostMicroBatches * (GemmAlgorithms::kWorkspace + kPartialBytes + kPlanBytes) +
           kExchangeBytes + kScanBytes +
           unpacking_micro_batches() * (most_unpacked_ + quantised_row_bytes(largest));
  }
  void reserve(const OperandLimits& largest) override {
    reserve_quantised_rows(quantised_row_bytes(largest));
  }

  /// Decode steps are divided among the SMs once, by the first attention() of the batch that
  /// follows this; without this call by every attention(). Between this and the last attention() of
  /// the step nothing may change the batch's tensors, but its tokens, and nothing but the step's
  /// own rows is stored in the cache. To be recorded together with the step.
  void begin_step(const Batch& batch) override;
  bool has_e4m3_cache() const override { return true; }

  int micro_batches_for(const DecodeSize& size) const override;
  void run_micro_batches(int micro_batches, const std::function<void(int)>& body) override;

  bool keeps(WeightFormat format, int64_t n, int64_t k, bool stacked) const override;
  size_t weight_bytes(WeightFormat format, int64_t n, int64_t k) const override;
  Weight weight_view(std::byte* data, WeightFormat format, int64_t n, int64_t k) const override;
  void load(Tensor dst, std::span<const Tensor> parts) override;
  void load_quantised(Weight dst, const QuantizedRows& rows) override;
  void load_all(std::span<const WeightSource> weights, const SourceReader& read,
                const std::function<void(size_t)>& loaded) override;

  void gemm(Tensor y, Tensor x, Weight w) override;
  GemmTuning tune_gemm(Tensor y, Tensor x, Weight w) override;
  void gemm_silu_and_mul(Tensor y, Tensor gate_up, Tensor x, Weight w) override;
  void embedding(Tensor y, Tensor tokens, Weight table, int64_t first_row) override;
  void feed_tokens(Tensor tokens, Tensor source, Tensor sampled, Tensor slots,
                   Tensor slot_tokens) override;
  void gather_rows(Tensor y, Tensor x, Tensor rows) override;
  void add(Tensor x, Tensor y) override;
  void add_bias(Tensor x, Tensor bias) override;
  void rms_norm(Tensor y, Tensor x, Tensor w, float eps) override;
  void rotary_embedding(Tensor q, Tensor k, Tensor positions, Tensor cos_sin) override;
  void store_kv(KvCache cache, Tensor k, Tensor v, Tensor slot_mapping) override;
  void attention(Tensor out, Tensor q, KvCache cache, const Batch& batch, float scale,
                 int64_t window) override;
  void silu_and_mul(Tensor y, Tensor gate_up) override;
  void moe_route(Tensor weights, Tensor ids, Tensor logits, bool normalise) override;
  void moe_router(Tensor weights, Tensor ids, Tensor logits, Tensor x, Weight w, bool normalise,
                  Tensor slot_mapping) override;
  void moe_mlp(Tensor y, Tensor x, Tensor weights, Tensor ids, Weight gate_up, Weight down,
               const MoeWorkspace& work) override;
  void apply_token_masks(Tensor logits, Tensor mask_rows, Tensor masks) override;
  void bias_logits(Tensor logits, Tensor biases, const Batch& batch, int64_t first_row) override;
  void apply_penalties(Tensor logits, const SamplingBatch& params, Tensor slot_tokens,
                       Tensor block_tables) override;
  void sample(Tensor token_ids, Tensor logits, const SamplingBatch& params) override;
  void top_logprobs(Tensor ids, Tensor logprobs, Tensor ranks, Tensor logits,
                    Tensor chosen) override;
  void add_rms_norm(Tensor y, Tensor residual, Tensor x, Tensor w, float eps,
                    Weight reader = {}) override;
  void gemm_add_rms_norm(Tensor y, Tensor residual, Tensor x, Weight w, Tensor norm, float eps,
                         Weight reader = {}) override;
  void rope_store(Tensor q, Tensor k, Tensor v, const Batch& batch, Tensor cos_sin,
                  KvCache cache) override;
  void qk_norm_rope_store(Tensor q, Tensor k, Tensor v, Tensor q_norm, Tensor k_norm, float eps,
                          const Batch& batch, Tensor cos_sin, KvCache cache) override;
  bool fused_rope_store_attention(Tensor out, Tensor q, Tensor k, Tensor v, const HeadNorms& norms,
                                  const Batch& batch, Tensor cos_sin, KvCache cache, float scale,
                                  int64_t window) override;
#ifdef NANOVLLM_CUDA_HOPPER
  bool fused_gemm_sample(Tensor token_ids, Tensor x, Weight w,
                         const SamplingBatch& params) override;
  bool fused_gemm_qk_norm_rope_store(Tensor qkv, Tensor q, Tensor k, Tensor v, Tensor x, Weight w,
                                     Tensor q_norm, Tensor k_norm, float eps, const Batch& batch,
                                     Tensor cos_sin, KvCache cache) override;
#endif
  bool decoder_layers(Tensor x, Tensor residual, const DecoderStack& stack,
                      std::span<const KvCache> caches, const Batch& batch) override;

  /// The other ranks' GPUs, for sample_part() and decoder_layers(); null: none. Outlives its use.
  void set_peers(const PeerTable* peers) { peers_ = peers; }
  /// RankFusions::sample() of a rank with peers.
  bool sample_part(Tensor token_ids, Tensor logits, int64_t vocab_size,
                   const SamplingBatch& params);
  /// gemm(y, x, w), rounded to bf16, whose results go to where ranks sum them; y is not written.
  /// False, and nothing done, where no such kernel takes this product.
  bool gemm_sent(Tensor y, Tensor x, const Weight& w, const SentParts& to) {
    return run_gemm(y, x, w, GemmEnd::send, nullptr, &to);
  }
  /// go(end) for a kernel that makes the rows of y, which `reader` multiplies next: it quantises
  /// them with `end` (norm_rows.cuh). False where go is, or rows are to stay as they are.
  template <class Go>
  bool with_rows_for(const Weight& reader, Tensor y, Go&& go);
  /// The kernel that serves a product, and why others do not (choose.h), where nothing runs beside.
  std::string explain(const GemmProblem& problem) const {
    return explain_gemm(problem, gemm_gpu());
  }
  /// The facts that decide which kernels run here. Ranks that differ in them may choose
  /// differently.
  struct Kind {
    int code_architecture, num_sms;
    size_t shared_bytes;
    bool is_hopper, can_run_cooperatively;
    bool operator==(const Kind&) const = default;
  };
  Kind kind() const {
    return {code_architecture_, num_sms_, max_shared_bytes_, is_hopper_, can_run_cooperatively_};
  }
  /// Whether registers do not unpack some quantised weight. Other ranks' parts may differ in that.
  bool has_uneven_weights() const { return has_uneven_weights_ || !uneven_.empty(); }
  using KernelLauncher::can_launch_early;
  /// Returns when cuBLASLt's families have been compared, which the first start on a GPU does
  /// beside all that needs no cuBLASLt.
  void await_gemm_families() {
    if (families_compared_.valid()) families_compared_.get();
  }
  /// From now on kernels may wait for other ranks. Loading is to end with await_gemm_families(): to
  /// load the library's kernels may need an idle device.
  void expect_ranks() { has_ranks_ = true; }
  /// How many blocks of a kernel without dynamic shared memory the GPU runs at once.
  int resident_blocks(const void* kernel, int threads) const;
  /// The same of the kernel of sample_part().
  int resident_sampling_blocks() const;

  /// For tests (cuda_trial.h).
  void limit(const CudaLimits& limits);
  /// Likewise: compares algorithms of cuBLASLt with gemm_in_order().
  GemmComparison compare_algorithms();

 private:
  static constexpr size_t kPartialBytes = size_t{64}
                                          << 20;  // attention: partial results of split sequences
  static constexpr size_t kPlanBytes = size_t{1} << 20;  // attention: kMaxPlans, and counters
  static constexpr size_t kMaxPlans = 4;
  static constexpr size_t kExchangeBytes = size_t{16} << 20;  // decoder_layers()
  static constexpr size_t kScanBytes = size_t{8} << 20;  // sampling: what a pass over rows finds

  /// The facts that the division of a decode step depends on.
  struct PlanKey {
    const std::byte *cu_seqlens_q, *context_lens, *block_tables;
    int64_t table_stride, block_shift, num_seqs, kv_heads, window, shares, max_slots;
    bool operator==(const PlanKey&) const = default;
  };

  void take_path_of(std::string_view architecture);

  /// Rows that are quantised for the product of x with `reader`: of no product, where x is null.
  struct QuantisedOperand {
    const std::byte *x = nullptr, *reader = nullptr;
    std::byte *numbers = nullptr, *scales = nullptr;
  };
  /// The memory that operations of different micro-batches must not share.
  struct MicroBatch {
    Stream stream;
    Event fence;  // micro-batch 0: the micro-batches begin; the others: their end
    Buffer blas_workspace, partials, plans, prefill_counters;
    Buffer unpacked;                  // a quantised weight as bf16
    Buffer quantised;                 // rows of a product, and their scales
    QuantisedOperand operand;         // of the next product
    const std::byte* step = nullptr;  // the lengths of the batch of begin_step()
    std::vector<PlanKey> step_plans;  // made since then
  };
  void open_micro_batch(MicroBatch& micro_batch);
  cudaStream_t stream() const override { return micro_batch_->stream.get(); }
  Stream ahead_;  // copy_ahead()'s
  Event copied_ahead_;
  /// Whether the operations issued now share the GPU's SMs with another micro-batch's, each with
  /// its own.
  bool divides_sms() const { return runs_micro_batches_; }
  /// Of attention in this micro-batch. The last micro-batch's is the comparison's until that is
  /// done.
  std::byte* partial_results() {
    if (micro_batch_ == &micro_batches_.back()) await_gemm_families();
    return micro_batch_->partials.get();
  }
  /// Finds out which of cuBLASLt's families give the bits of gemm_in_order() here, beside whatever
  /// else is done (gemm_tuning.cpp).
  void compare_gemm_families();
  /// Calls use(algorithm, whether its bits are those of gemm_in_order()) for each of choose(key)
  /// that computes y = x w^T of some sizes.
  void compare_with_in_order(
      const std::function<std::vector<cublasLtMatmulAlgo_t>(const GemmKey&)>& choose,
      const std::function<void(const cublasLtMatmulAlgo_t&, bool)>& use);
  /// Whether mma.sync multiplies E4M3 numbers.
  bool has_e4m3() const { return code_architecture_ >= 89; }
  /// As the choice of a product's kernel sees this GPU, in the micro-batch whose operations are
  /// issued.
  GemmGpu gemm_gpu() const {
    return {.has_wgmma = is_hopper_,
            .has_tma = encode_map_ != nullptr,
            .has_e4m3 = has_e4m3(),
            .num_sms = num_sms_,
            .shared_bytes = max_shared_bytes_,
            .own_sms = divides_sms() ? other_sms_ : 0};
  }
  /// choose_gemm() for this GPU; with NANOVLLM_DEBUG=gemm, said on standard error the first time.
  GemmChoice choose(const GemmProblem& problem);
  /// Launches what is chosen for y = x w^T, or what `end` makes of it. False, and nothing done,
  /// where no kernel has that end. `heads`, `sent`: of these ends.
  bool run_gemm(Tensor y, Tensor x, const Weight& w, GemmEnd end, const HeadsInput* heads = nullptr,
                const SentParts* sent = nullptr);
  void gemm_skinny(Tensor y, Tensor x, const Weight& w, bool gated, const SkinnyPlan& plan);
  void gemm_mid(Tensor y, Tensor x, const Weight& w, const MidPlan& plan, const HeadsInput* heads,
                const SentParts* sent);
  void gemm_wide(Tensor y, Tensor x, const Weight& w, const WidePlan& plan, const SentParts* sent);
  void gemm_large(Tensor y, Tensor x, const Weight& w, GemmEnd end, const LargePlan& plan,
                  const HeadsInput* heads);
  /// False, and nothing done, where cuBLASLt has no algorithm that adds in order.
  /// y of rank 3: the products of both halves of k.
  bool gemm_blas(Tensor y, Tensor x, Tensor w);
  bool gemm_blas_in_halves(Tensor y, Tensor x, Tensor w);
  /// f(room for the products of both halves of k, from, to) for the rows from .. to - 1 of y, as
  /// many at once as there is room for.
  template <class F>
  void with_halves(const Tensor& y, F&& f);
  /// y = a + b, as add().
  void add(Tensor y, Tensor a, Tensor b);
  /// Finds of each row of x w^T what a scan for sampling would, without storing them
  /// (gemm_sample_sm90a.cu). False, and nothing done, where another way is better.
  bool gemm_scan(Tensor x, const Weight& w, const RowRules& rules, RowScan& scan);
  /// Of 8-bit numbers and rows that become such, on any GPU (gemm_w8a8.cu).
  void gemm_w8a8(Tensor y, Tensor x, const Weight& w, bool gated, const W8a8Plan& plan);
  /// Of a quantised weight, with few rows (gemm_packed_sm90a.cu).
  void gemm_packed(Tensor y, Tensor x, const Weight& w, bool gated, const PackedPlan& plan);
  /// The same on any GPU (gemm_mma.cu).
  void gemm_mma(Tensor y, Tensor x, const Weight& w, bool gated, const MmaPlan& plan);
  /// Of E4M3 numbers and rows that become such (gemm_fp8_sm90a.cu).
  void gemm_fp8(Tensor y, Tensor x, const Weight& w, bool gated, const Fp8Plan& plan,
                const SentParts* sent);
  /// The same of int8 (gemm_int8_sm90a.cu).
  void gemm_int8(Tensor y, Tensor x, const Weight& w, bool gated, const Fp8Plan& plan,
                 const SentParts* sent);
  /// Launches a tile of either (fp8_maps.cuh).
  template <auto tile>
  void launch_fp8(Tensor y, Tensor x, const Weight& w, const Fp8Plan& plan,
                  const QuantisedOperand& operand, const SentParts* sent);
  /// Room for `rows` rows of `reader`'s columns in the micro-batch's memory, until the next call.
  QuantisedOperand quantised_room(int64_t rows, const Weight& reader);
  /// `places`: the rows to be are these, of the tokens that are x's rows.
  QuantisedOperand quantise_rows(Tensor x, const Weight& w, const ExpertPlan* places = nullptr);
  /// Rows that the operation before has quantised for this product; else quantises x.
  QuantisedOperand take_operand(Tensor x, const Weight& w);
  void load_fp8(const Weight& dst, const QuantizedRows& rows);
  static void check_head_dim(int64_t head_dim);
  static size_t quantised_row_bytes(int64_t rows, int64_t columns);
  static size_t quantised_row_bytes(const OperandLimits& largest) {
    return std::max(quantised_row_bytes(largest.rows, largest.quantised_columns),
                    quantised_row_bytes(largest.rows * largest.experts_per_token,
                                        largest.quantised_expert_columns));
  }
  /// Gives each micro-batch so much for them, if it has less.
  void reserve_quantised_rows(size_t bytes);
  /// The micro-batches whose products may need a quantised weight as bf16, or quantise rows.
  size_t unpacking_micro_batches() const { return other_sms_ > 0 ? kMostMicroBatches : 1; }
  /// f(w as plain bf16), in the micro-batch's memory until the next call. No kernel of f may begin
  /// before that is written, as it might with weights.
  template <class F>
  auto with_unpacked(const Weight& w, F&& f) {
    const Weight plain = unpack(w);
    struct Restore {
      bool& place;
      bool was;
      ~Restore() { place = was; }
    } const restore{can_launch_early_, std::exchange(can_launch_early_, false)};
    return f(plain);
  }
  Weight unpack(const Weight& w);
  static void check_attention(const Tensor& out, const Tensor& q, const KvCache& cache,
                              int64_t window);
  void attention_bf16(Tensor out, Tensor q, KvCache cache, const Batch& batch, float scale,
                      int64_t window);
  /// Many rows, on Hopper (attention_prefill_sm90a.cu). False, and nothing done, where another way
  /// is better.
  bool attention_prefill(Tensor out, Tensor q, KvCache cache, const Batch& batch, float scale,
                         int64_t window);
  void attention_f32(Tensor out, Tensor q, KvCache cache, const Batch& batch, float scale,
                     int64_t window);
  /// Heads as the projection makes them, that decode attention makes its own of.
  struct RawHeads {
    Tensor k, v, cos_sin;
    const HeadNorms& norms;
  };
  bool attention_decode(Tensor out, Tensor q, KvCache cache, const Batch& batch, float scale,
                        int64_t window, const RawHeads* raw = nullptr);
  /// Whether decode attention takes heads as the projection makes them.
  bool takes_raw_heads(const Tensor& q, const RawHeads& raw, const KvCache& cache,
                       const Batch& batch) const;
  size_t plan_decode(const PlanKey& key, bool& is_new);
  /// Both norms, of many rows (norm.cu). False, and nothing done, where another way is better.
  template <bool kAdd>
  bool norm_many_rows(Tensor y, Tensor residual, Tensor x, Tensor w, float eps);
  /// add_rms_norm() of add() of the two `parts` [2, t, n]. False, and nothing done, likewise.
  bool add_norm_of_parts(Tensor y, Tensor residual, Tensor parts, Tensor w, float eps);
  /// Whether what a kernel of this step reads of the batch is there before it is launched: since
  /// begin_step() a kernel has waited for all before it, as the first attention after a plan does.
  bool is_settled(const Batch& batch) const {
    return micro_batch_->step == batch.context_lens.data && !micro_batch_->step_plans.empty();
  }
  /// How the copy engine sees a stack of weights: [64, rows of a half, halves, slices of 64 along
  /// k, experts], in boxes of `box_rows` of each half by `box_slices`.
  CUtensorMap map_experts(const Tensor& w, int halves, int box_rows, int box_slices) const;
  void sample_rows(Tensor token_ids, Tensor logits, const SamplingBatch& params, int64_t first_id,
                   const PeerTable* peers);
  /// A product of experts that have many tokens (moe_many_sm90a.cu): y[place] = x w^T, with the
  /// gate where y is half as wide. A tile of the plan has at most 128 rows.
  void multiply_many_experts(Tensor y, Tensor x, Tensor w, const ExpertPlan& plan);
  /// A product of experts whose weight is quantised, with the gate likewise; false where it is not.
  bool multiply_quantised_experts(Tensor y, Tensor x, const Weight& w, const ExpertPlan& plan,
                                  const ExpertChoice& choice);
  /// Of experts that quantise rows, in the order of their places, with the gate likewise; on
  /// Hopper (moe_fp8_sm90a.cu), and elsewhere (moe_w8a8.cu). A tile of the plan has at most
  /// `tile_tokens` rows: 8, 16, 32, 64 or 128.
  void multiply_fp8_experts(Tensor y, const QuantisedOperand& x, const Weight& w,
                            const ExpertPlan& plan, int tile_tokens);
  void multiply_w8a8_experts(Tensor y, const QuantisedOperand& x, const Weight& w,
                             const ExpertPlan& plan, int tile_tokens);
  /// Of experts whose weights are packed (moe_packed.cu), with the gate likewise, on any GPU. A
  /// tile of the plan has at most 32 rows, or 128 where unpacks_simply().
  void multiply_packed_experts(Tensor y, Tensor x, const Weight& w, const ExpertPlan& plan);
  /// The same of experts that have many tokens, and no uneven matrix (moe_packed_many_sm90a.cu).
  void multiply_many_packed_experts(Tensor y, Tensor x, const Weight& w, const ExpertPlan& plan);
  /// Whether a stack is not packed, or no matrix of it is uneven or has several scales in a record.
  bool unpacks_simply(const Weight& stack) const;
  /// Notes whether a weight that has just come is in a list.
  void note(std::set<const std::byte*>& list, const Weight& w, bool belongs);
  /// Whether a weight, or any matrix of a stack, is in such a list.
  static bool has_any(const std::set<const std::byte*>& list, const Weight& w);
  /// moe_route(), as moe_router() does it: `slots` are its slot_mapping's, or null.
  void route(const Tensor& weights, const Tensor& ids, const Tensor& logits, bool normalise,
             const int* slots);
  void moe_plan(const ExpertPlan& plan);
  /// moe_mlp() by ExpertKernel::stream or, not `sorted`, ExpertKernel::pairs.
  void stream_experts(Tensor y, Tensor x, Tensor weights, Tensor ids, Tensor gate_up, Tensor down,
                      const MoeWorkspace& work, bool sorted);
  void moe_sum(Tensor y, Tensor out, Tensor weights, const ExpertPlan& plan);
  /// decoder_layers() on Hopper, as one kernel (decoder_layers_sm90a.cu).
  bool whole_decoder_layers(Tensor x, Tensor residual, const DecoderStack& stack,
                            std::span<const KvCache> caches, const Batch& batch);
  template <int kHeadDim>
  bool launch_decoder_layers(decoder::Arguments& arguments);

  int code_architecture_ = 0;           // of what runs (code_architecture.h), not of the GPU
  bool is_hopper_ = false;              // and code for sm_90a alone runs here
  bool can_run_cooperatively_ = false;  // decoder_layers(); false for good once a launch fails
  uint32_t last_epoch_ = 0;             // of decoder_layers(); 0: as it has it
  std::array<MicroBatch, kMostMicroBatches> micro_batches_;
  MicroBatch* micro_batch_ = &micro_batches_[0];  // whose operations are issued
  bool runs_micro_batches_ = false;               // several of them
  int other_sms_ = 0;  // that attention then leaves to another micro-batch's products; 0: none
  BlasLt blas_;
  EncodeMap encode_map_ = nullptr;  // of the driver; for code that has TMA: from sm_90 on
  Buffer exchange_, scan_scratch_;
  std::set<const std::byte*> uneven_;  // quantised weights that registers do not unpack
  std::set<const std::byte*> fine_;    // int4 weights that CoarseUnpack does not unpack
  bool has_uneven_weights_ = false;    // for tests: as if uneven_ had one
  mutable size_t most_unpacked_ = 0;   // bytes as bf16, of the quantised weights asked about
  size_t room_to_unpack_ = 0;          // that a micro-batch has
  size_t room_for_quantised_ = 0;      // likewise
  std::unordered_map<const std::byte*, float> input_scales_;  // of weights with one for all rows
  bool has_ranks_ = false;
  const PeerTable* peers_ = nullptr;
  std::unique_ptr<GemmAlgorithms> gemm_algorithms_;
  bool logs_choices_ = false;               // NANOVLLM_DEBUG=gemm
  std::set<std::string> logged_choices_;    // lines
  std::unique_ptr<StagingBuffer> staging_;  // of load(), opened by the first
  std::future<void> families_compared_;     // its thread uses what stands above
};

}  // namespace nanovllm
