// StepRecorder: a backend that does what another does and remembers the operations of the step that
// ran last, so that each kind of them can be run again alone, and timed. It also counts the steps
// by what they say to other ranks.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ops/forwarding_backend.h"
#include "ranks/open_ranks.h"

namespace nanovllm::cli {

struct RecordedOp {
  const char* part = "";  ///< "attention", "gemm qkv", "small kernels", "sampling", ...
  const char* name = "";  ///< of a small kernel, its own: "add_rms_norm", ...; else the part's
  double bytes = 0;       ///< of activations that a small kernel reads and writes
  /// Of a gemm: x is [rows, k], the weight [n, k]. Of all layers in one: n of k = 1, all weights.
  int64_t rows = 0, n = 0, k = 0;
  double weight_bytes = 0;      ///< of its weights, in their format
  bool quantises_rows = false;  ///< so both sides of the product are numbers of 8 bits
  std::function<void()> run;    ///< issues it again, on the same memory
  /// Of communication: runs beside what follows it, which waits for events of other devices.
  bool beside = false;
  /// Of all layers in one, where these sum over ranks: `num_sums` all_reduce() of the same sizes,
  /// and what issues them.
  int64_t num_sums = 0;
  std::function<void()> sums{};
};

/// Steps that issue the same collectives.
struct StepKind {
  std::vector<RecordedOp> collectives;  ///< of one of them, in order
  int64_t calls = 0;                    ///< collectives of a step
  int64_t count = 0;                    ///< steps issued
};

class StepRecorder : public ForwardingBackend, public BackendProxy {
 public:
  using ForwardingBackend::ForwardingBackend;

  /// The operations of the step that was issued last, in order, be it eagerly or as a graph.
  const std::vector<RecordedOp>& last_step() const { return *current_; }
  using StepKinds = std::map<std::string, StepKind>;
  /// Of several ranks: the kinds of steps that were issued, by names that are the same on all
  /// ranks.
  const StepKinds& kinds();
  /// The name of the one that was issued last; null before the first.
  const std::string* last_kind();
  /// Of all kinds, none was issued yet.
  void forget_steps();
  /// The backend that they were issued on.
  Backend& inner() override { return *ops_; }
  /// Its operations are recorded, too: "communication".
  std::unique_ptr<Communicator> wrap(std::unique_ptr<Communicator> communicator) override;

  std::unique_ptr<Graph> capture(const std::function<void()>& body) override;
  void begin_step(const Batch& batch) override;
  void run_micro_batches(int micro_batches, const std::function<void(int)>& body) override;

  void gemm(Tensor y, Tensor x, Weight w) override;
  void gemm_silu_and_mul(Tensor y, Tensor gate_up, Tensor x, Weight w) override;
  bool fused_gemm_sample(Tensor token_ids, Tensor x, Weight w,
                         const SamplingBatch& params) override;
  bool fused_gemm_qk_norm_rope_store(Tensor qkv, Tensor q, Tensor k, Tensor v, Tensor x, Weight w,
                                     Tensor q_norm, Tensor k_norm, float eps, const Batch& batch,
                                     Tensor cos_sin, KvCache cache) override;
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
  bool decoder_layers(Tensor x, Tensor residual, const DecoderStack& stack,
                      std::span<const KvCache> caches, const Batch& batch) override;
  void moe_route(Tensor weights, Tensor ids, Tensor logits, bool normalise) override;
  void moe_mlp(Tensor y, Tensor x, Tensor weights, Tensor ids, Weight gate_up, Weight down,
               const MoeWorkspace& work) override;
  void moe_router(Tensor weights, Tensor ids, Tensor logits, Tensor x, Weight w, bool normalise,
                  Tensor slot_mapping) override;
  void apply_token_masks(Tensor logits, Tensor mask_rows, Tensor masks) override;
  void bias_logits(Tensor logits, Tensor biases, const Batch& batch, int64_t first_row) override;
  void apply_penalties(Tensor logits, const SamplingBatch& params, Tensor slot_tokens,
                       Tensor block_tables) override;
  void sample(Tensor token_ids, Tensor logits, const SamplingBatch& params) override;
  void top_logprobs(Tensor ids, Tensor logprobs, Tensor ranks, Tensor logits,
                    Tensor chosen) override;
  void add_rms_norm(Tensor y, Tensor residual, Tensor x, Tensor w, float eps,
                    Weight reader) override;
  void gemm_add_rms_norm(Tensor y, Tensor residual, Tensor x, Weight w, Tensor norm, float eps,
                         Weight reader) override;
  bool fused_rope_store_attention(Tensor out, Tensor q, Tensor k, Tensor v, const HeadNorms& norms,
                                  const Batch& batch, Tensor cos_sin, KvCache cache, float scale,
                                  int64_t window) override;
  void rope_store(Tensor q, Tensor k, Tensor v, const Batch& batch, Tensor cos_sin,
                  KvCache cache) override;
  void qk_norm_rope_store(Tensor q, Tensor k, Tensor v, Tensor q_norm, Tensor k_norm, float eps,
                          const Batch& batch, Tensor cos_sin, KvCache cache) override;

 private:
  using Ops = std::vector<RecordedOp>;
  class RecordedGraph;
  class RecordedCommunicator;

  /// Remembers `run` and does it.
  void note(const char* part, std::function<void()> run);
  /// The same for a small kernel that reads or writes each of `touched` once.
  void note_small(const char* name, std::initializer_list<Tensor> touched,
                  std::function<void()> run);
  void add_small(const char* name, std::initializer_list<Tensor> touched,
                 std::function<void()> run);
  /// The same for the product of x and w.
  void note_gemm(const char* part, Tensor x, const Weight& w, std::function<void()> run);
  /// Remembers a product of x and w that has run, and what it reads and writes besides.
  void add_gemm(const char* part, Tensor x, const Weight& w, double bytes,
                std::function<void()> run);
  /// The part that is the product of w, which is issued now.
  const char* next_product(const Weight& w);
  /// The weight that is read after that of `down`.
  const char* after_layer() const;
  /// Where steps with these operations are counted.
  StepKinds::value_type& kind_of(const Ops& ops);
  /// A step was issued.
  void count(StepKinds::value_type& kind);
  /// Counts the one whose operations are complete only now that the next one begins.
  void count_eager();

  Communicator* communicator_ = nullptr;  // what it is without the recorder, once it is wrapped
  StepKinds kinds_;
  const std::string* last_kind_ = nullptr;
  std::shared_ptr<Ops> eager_;  // the operations of a step to be counted
  bool is_capturing_ = false;
  std::shared_ptr<Ops> current_ = std::make_shared<Ops>();
  bool in_micro_batches_ = false;
  const char* next_gemm_ =
      nullptr;               // which weight the next product reads: told by what came before
  int64_t qkv_columns_ = 0;  // of the first layer's, once it has run
  bool is_last_layer_ = false;
  const std::byte* last_weight_ = nullptr;  // of gemm(): some of its rows may follow
  const char* last_gemm_ = nullptr;
};

}  // namespace nanovllm::cli
