#include "bench/step_recorder.h"

#include <utility>

#include <fmt/format.h>

#include "bench/roofline/roofline.h"

namespace nanovllm::cli {
namespace {

constexpr const char *kAttention = "attention", *kExperts = "experts", *kLayers = "all layers",
                     *kSmall = "small kernels", *kSampling = "sampling",
                     *kCommunication = "communication";
constexpr const char *kQkv = "gemm qkv", *kOut = "gemm o", *kGateUp = "gemm gate_up",
                     *kDown = "gemm down", *kHead = "gemm lm_head";

}  // namespace

/// A graph that knows its operations: replaying it makes them those of the last step.
class StepRecorder::RecordedGraph final : public Graph {
 public:
  RecordedGraph(std::unique_ptr<Graph> graph, std::shared_ptr<Ops> ops, StepRecorder& recorder)
      : graph_(std::move(graph)), ops_(std::move(ops)), recorder_(recorder) {
    if (recorder.communicator_) kind_ = &recorder.kind_of(*ops_);
  }
  bool is_ready() override { return graph_->is_ready(); }
  void wait_until_ready() override { graph_->wait_until_ready(); }
  void launch() override {
    recorder_.count_eager();
    if (kind_) recorder_.count(*kind_);
    recorder_.current_ = ops_;
    graph_->launch();
  }

 private:
  std::unique_ptr<Graph> graph_;
  std::shared_ptr<Ops> ops_;
  StepRecorder& recorder_;
  StepKinds::value_type* kind_ = nullptr;
};

std::unique_ptr<Graph> StepRecorder::capture(const std::function<void()>& body) {
  auto before = std::exchange(current_, std::make_shared<Ops>());
  is_capturing_ = true;
  auto graph = ops_->capture(body);
  is_capturing_ = false;
  if (!graph) return nullptr;
  const auto recorded = std::exchange(current_, std::move(before));  // it has not run yet
  return std::make_unique<RecordedGraph>(std::move(graph), recorded, *this);
}

StepRecorder::StepKinds::value_type& StepRecorder::kind_of(const Ops& ops) {
  StepKind kind;
  std::string key;
  for (const RecordedOp& op : ops) {
    const bool is_collective = op.part == kCommunication;
    if (!is_collective && !op.sums) continue;
    const bool is_end = is_collective && op.rows == 0;  // of one that was started before
    const int64_t calls = is_collective ? (is_end ? 0 : 1) : op.num_sums;
    key += fmt::format("{} {} {} {};", calls, op.rows, op.n, op.beside);
    kind.calls += calls;
    kind.collectives.push_back(op);
    if (op.sums) kind.collectives.back().run = op.sums;
  }
  return *kinds_.try_emplace(std::move(key), std::move(kind)).first;
}

void StepRecorder::count(StepKinds::value_type& kind) {
  ++kind.second.count;
  last_kind_ = &kind.first;
}

void StepRecorder::count_eager() {
  if (const auto ops = std::exchange(eager_, nullptr)) count(kind_of(*ops));
}

const StepRecorder::StepKinds& StepRecorder::kinds() {
  count_eager();
  return kinds_;
}

const std::string* StepRecorder::last_kind() {
  count_eager();
  return last_kind_;
}

void StepRecorder::forget_steps() {
  count_eager();
  last_kind_ = nullptr;
  for (auto& [key, kind] : kinds_) kind.count = 0;
}

void StepRecorder::begin_step(const Batch& batch) {
  if (!in_micro_batches_) {
    if (!is_capturing_) count_eager();
    current_ = std::make_shared<Ops>();
    if (communicator_ && !is_capturing_) eager_ = current_;
  }
  next_gemm_ = kQkv;
  last_weight_ = nullptr;
  qkv_columns_ = 0;
  is_last_layer_ = false;
  note(kAttention, [=, this] { ops_->begin_step(batch); });  // what it prepares is attention's
}

const char* StepRecorder::after_layer() const { return is_last_layer_ ? kHead : kQkv; }

void StepRecorder::run_micro_batches(int micro_batches, const std::function<void(int)>& body) {
  in_micro_batches_ = true;
  ops_->run_micro_batches(micro_batches, body);
  in_micro_batches_ = false;
}

void StepRecorder::note(const char* part, std::function<void()> run) {
  run();
  current_->push_back({.part = part, .name = part, .run = std::move(run)});
}

void StepRecorder::note_small(const char* name, std::initializer_list<Tensor> touched,
                              std::function<void()> run) {
  run();
  add_small(name, touched, std::move(run));
}

void StepRecorder::add_small(const char* name, std::initializer_list<Tensor> touched,
                             std::function<void()> run) {
  current_->push_back({.part = kSmall, .name = name, .run = std::move(run)});
  for (const Tensor& t : touched) current_->back().bytes += double(t.numel() * size_of(t.dtype));
}

void StepRecorder::note_gemm(const char* part, Tensor x, const Weight& w,
                             std::function<void()> run) {
  run();
  add_gemm(part, x, w, 0, std::move(run));
}

void StepRecorder::add_gemm(const char* part, Tensor x, const Weight& w, double bytes,
                            std::function<void()> run) {
  current_->push_back({.part = part, .name = part, .run = std::move(run)});
  RecordedOp& op = current_->back();
  op.rows = x.shape[0];
  op.n = w.n();
  op.k = w.k();
  op.weight_bytes = bytes_of(w);
  op.quantises_rows = w.format.quantises_rows();
  op.bytes = bytes;
}

/// Operations without a name of their own pass through.
class StepRecorder::RecordedCommunicator final : public Communicator, public RankFusions {
 public:
  RecordedCommunicator(StepRecorder& recorder, std::unique_ptr<Communicator> inner)
      : recorder_(recorder), inner_(std::move(inner)) {}

  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  RankFusions& fusions() override { return *this; }
  void settle() override { inner_->settle(); }
  void abort() override { inner_->abort(); }

  void all_reduce(Tensor x) override {
    note(x, [=, this] { inner_->all_reduce(x); });
  }
  void all_gather(Tensor out, Tensor parts) override {
    note(out, [=, this] { inner_->all_gather(out, parts); });
  }

  int64_t rows_worth_halving() const override { return inner_->fusions().rows_worth_halving(); }
  bool sums_in_decoder_layers() override { return inner_->fusions().sums_in_decoder_layers(); }
  /// Noted as the product and the sum that it is made of: each can run again by itself.
  bool gemm_for_sum(Tensor y, Tensor x, Weight w) override {
    if (!inner_->fusions().gemm_for_sum(y, x, w)) return false;
    recorder_.add_gemm(recorder_.next_product(w), x, w, 0,
                       [=, this] { recorder_.ops_->gemm(y, x, w); });
    return true;
  }
  bool all_reduce_add_rms_norm(Tensor x, Tensor residual, Tensor w, float eps, Weight) override {
    return note_if(kCommunication, x, [=, this] {
      return inner_->fusions().all_reduce_add_rms_norm(x, residual, w, eps);
    });
  }
  bool start_add_rms_norm(int half, Tensor x, Tensor residual, Tensor w, float eps,
                          bool whole) override {
    const bool started = note_if(kCommunication, x, [=, this] {
      return inner_->fusions().start_add_rms_norm(half, x, residual, w, eps, whole);
    });
    if (started) recorder_.current_->back().beside = true;
    return started;
  }
  void finish_half(int half) override {
    recorder_.note(kCommunication, [=, this] { inner_->fusions().finish_half(half); });
    recorder_.current_->back().beside = true;
  }
  bool sample(Tensor token_ids, Tensor logits, int64_t vocab_size,
              const SamplingBatch& params) override {
    return note_if(kSampling, logits, [=, this] {
      return inner_->fusions().sample(token_ids, logits, vocab_size, params);
    });
  }

 private:
  /// Of [rows, n]; see RecordedOp.
  void note(Tensor x, std::function<void()> run) {
    recorder_.note(kCommunication, std::move(run));
    recorder_.current_->back().rows = x.shape[0];
    recorder_.current_->back().n = x.shape[1];
  }
  bool note_if(const char* part, Tensor x, const std::function<bool()>& run) {
    if (!run()) return false;
    recorder_.current_->push_back(
        {.part = part, .name = part, .rows = x.shape[0], .n = x.shape[1], .run = [run] {
           (void)run();
         }});
    return true;
  }

  StepRecorder& recorder_;
  std::unique_ptr<Communicator> inner_;
};

std::unique_ptr<Communicator> StepRecorder::wrap(std::unique_ptr<Communicator> communicator) {
  communicator_ = communicator.get();
  return std::make_unique<RecordedCommunicator>(*this, std::move(communicator));
}

const char* StepRecorder::next_product(const Weight& w) {
  const char* part = w.data.data == last_weight_ ? last_gemm_ : next_gemm_;
  // Behind the last layer comes the head: its weight has another size.
  if (part == kQkv && qkv_columns_ != 0 && w.n() != qkv_columns_) part = kHead;
  if (part == kQkv) qkv_columns_ = w.n();
  last_weight_ = w.data.data;
  last_gemm_ = part;
  next_gemm_ = part == kOut ? kGateUp : after_layer();
  return part;
}
void StepRecorder::gemm(Tensor y, Tensor x, Weight w) {
  note_gemm(next_product(w), x, w, [=, this] { ops_->gemm(y, x, w); });
}
void StepRecorder::gemm_silu_and_mul(Tensor y, Tensor gate_up, Tensor x, Weight w) {
  next_gemm_ = kDown;
  note_gemm(kGateUp, x, w, [=, this] { ops_->gemm_silu_and_mul(y, gate_up, x, w); });
}
bool StepRecorder::fused_gemm_sample(Tensor token_ids, Tensor x, Weight w,
                                     const SamplingBatch& params) {
  const auto run = [=, this] { return ops_->fused_gemm_sample(token_ids, x, w, params); };
  if (!run()) return false;
  add_gemm(kHead, x, w, 0.0, [run] { (void)run(); });
  return true;
}
bool StepRecorder::fused_gemm_qk_norm_rope_store(Tensor qkv, Tensor q, Tensor k, Tensor v, Tensor x,
                                                 Weight w, Tensor q_norm, Tensor k_norm, float eps,
                                                 const Batch& batch, Tensor cos_sin,
                                                 KvCache cache) {
  if (!ops_->fused_gemm_qk_norm_rope_store(qkv, q, k, v, x, w, q_norm, k_norm, eps, batch, cos_sin,
                                           cache))
    return false;
  qkv_columns_ = w.n();
  // The kernel may be one of micro-batches: outside them the body is what runs again.
  add_gemm(kQkv, x, w, double((q.numel() + 2 * k.numel()) * size_of(q.dtype)), [=, this] {
    ops_->gemm_qk_norm_rope_store(qkv, q, k, v, x, w, q_norm, k_norm, eps, batch, cos_sin, cache);
  });
  return true;
}
void StepRecorder::embedding(Tensor y, Tensor tokens, Weight table, int64_t first_row) {
  note_small("embedding", {tokens, y, y},
             [=, this] { ops_->embedding(y, tokens, table, first_row); });
}
void StepRecorder::feed_tokens(Tensor tokens, Tensor source, Tensor sampled, Tensor slots,
                               Tensor slot_tokens) {
  note_small("feed_tokens", {tokens, source, slots},
             [=, this] { ops_->feed_tokens(tokens, source, sampled, slots, slot_tokens); });
}
void StepRecorder::gather_rows(Tensor y, Tensor x, Tensor rows) {
  // Rows for the head, or what the last layer goes on with.
  if (next_gemm_ == kQkv)
    next_gemm_ = kHead;
  else
    is_last_layer_ = true;
  note_small("gather_rows", {rows, y, y}, [=, this] { ops_->gather_rows(y, x, rows); });
}
void StepRecorder::add(Tensor x, Tensor y) {
  note_small("add", {x, y, x}, [=, this] { ops_->add(x, y); });
}
void StepRecorder::add_bias(Tensor x, Tensor bias) {
  note_small("add_bias", {x, x}, [=, this] { ops_->add_bias(x, bias); });
}
void StepRecorder::rms_norm(Tensor y, Tensor x, Tensor w, float eps) {
  note_small("rms_norm", {y, x}, [=, this] { ops_->rms_norm(y, x, w, eps); });
}
void StepRecorder::rotary_embedding(Tensor q, Tensor k, Tensor positions, Tensor cos_sin) {
  note_small("rotary_embedding", {q, q, k, k},
             [=, this] { ops_->rotary_embedding(q, k, positions, cos_sin); });
}
void StepRecorder::store_kv(KvCache cache, Tensor k, Tensor v, Tensor slot_mapping) {
  note_small("store_kv", {k, v, k, v}, [=, this] { ops_->store_kv(cache, k, v, slot_mapping); });
}
void StepRecorder::attention(Tensor out, Tensor q, KvCache cache, const Batch& batch, float scale,
                             int64_t window) {
  next_gemm_ = kOut;
  note(kAttention, [=, this] { ops_->attention(out, q, cache, batch, scale, window); });
}
bool StepRecorder::fused_rope_store_attention(Tensor out, Tensor q, Tensor k, Tensor v,
                                              const HeadNorms& norms, const Batch& batch,
                                              Tensor cos_sin, KvCache cache, float scale,
                                              int64_t window) {
  const auto run = [=, this] {
    return ops_->fused_rope_store_attention(out, q, k, v, norms, batch, cos_sin, cache, scale,
                                            window);
  };
  if (!run()) return false;
  next_gemm_ = kOut;
  current_->push_back({.part = kAttention, .name = kAttention, .run = [run] { (void)run(); }});
  return true;
}
void StepRecorder::silu_and_mul(Tensor y, Tensor gate_up) {
  next_gemm_ = kDown;
  note_small("silu_and_mul", {gate_up, y}, [=, this] { ops_->silu_and_mul(y, gate_up); });
}
bool StepRecorder::decoder_layers(Tensor x, Tensor residual, const DecoderStack& stack,
                                  std::span<const KvCache> caches, const Batch& batch) {
  if (!ops_->decoder_layers(x, residual, stack, caches, batch)) return false;
  next_gemm_ = kHead;
  const std::vector<KvCache> kept(caches.begin(), caches.end());
  RecordedOp op;
  op.part = kLayers;
  op.rows = x.shape[0];
  op.k = 1;
  for (const DecoderWeights& layer : stack.layers)
    for (const Weight& w : {layer.qkv, layer.o, layer.gate_up, layer.down}) {
      const int64_t count = w.is_stack() ? stack.experts_per_token : 1;
      op.n += w.n() * w.k() * count;
      op.weight_bytes += bytes_of(w) * double(count) / double(w.count());
    }
  op.run = [=, this] { (void)ops_->decoder_layers(x, residual, stack, kept, batch); };
  if (communicator_ && communicator_->world_size() > 1) {
    const int64_t sums = 2 * std::ssize(stack.layers) - 1;  // the last is the caller's
    op.num_sums = sums;
    op.sums = [=, this] {
      for (int64_t i = 0; i < sums; ++i) communicator_->all_reduce(x);
    };
  }
  current_->push_back(std::move(op));
  return true;
}
void StepRecorder::moe_route(Tensor weights, Tensor ids, Tensor logits, bool normalise) {
  note(kExperts, [=, this] { ops_->moe_route(weights, ids, logits, normalise); });
}
void StepRecorder::moe_mlp(Tensor y, Tensor x, Tensor weights, Tensor ids, Weight gate_up,
                           Weight down, const MoeWorkspace& work) {
  next_gemm_ = after_layer();
  note(kExperts, [=, this] { ops_->moe_mlp(y, x, weights, ids, gate_up, down, work); });
}
void StepRecorder::moe_router(Tensor weights, Tensor ids, Tensor logits, Tensor x, Weight w,
                              bool normalise, Tensor slot_mapping) {
  // With the experts: alone, those would follow what others have left where the ids were.
  note(kExperts,
       [=, this] { ops_->moe_router(weights, ids, logits, x, w, normalise, slot_mapping); });
}
void StepRecorder::bias_logits(Tensor logits, Tensor biases, const Batch& batch,
                               int64_t first_row) {
  note(kSampling, [=, this] { ops_->bias_logits(logits, biases, batch, first_row); });
}

void StepRecorder::apply_penalties(Tensor logits, const SamplingBatch& params, Tensor slot_tokens,
                                   Tensor block_tables) {
  note(kSampling, [=, this] { ops_->apply_penalties(logits, params, slot_tokens, block_tables); });
}
void StepRecorder::apply_token_masks(Tensor logits, Tensor mask_rows, Tensor masks) {
  note(kSampling, [=, this] { ops_->apply_token_masks(logits, mask_rows, masks); });
}
void StepRecorder::sample(Tensor token_ids, Tensor logits, const SamplingBatch& params) {
  note(kSampling, [=, this] { ops_->sample(token_ids, logits, params); });
}
void StepRecorder::top_logprobs(Tensor ids, Tensor logprobs, Tensor ranks, Tensor logits,
                                Tensor chosen) {
  note(kSampling, [=, this] { ops_->top_logprobs(ids, logprobs, ranks, logits, chosen); });
}
// Without the reader: each operation is repeated by itself.
void StepRecorder::add_rms_norm(Tensor y, Tensor residual, Tensor x, Tensor w, float eps, Weight) {
  note_small("add_rms_norm", {residual, x, residual, y},
             [=, this] { ops_->add_rms_norm(y, residual, x, w, eps); });
}
// Noted as the product and the norm that it is made of.
void StepRecorder::gemm_add_rms_norm(Tensor y, Tensor residual, Tensor x, Weight w, Tensor norm,
                                     float eps, Weight reader) {
  ops_->gemm_add_rms_norm(y, residual, x, w, norm, eps, reader);
  add_gemm(next_product(w), x, w, 0, [=, this] { ops_->gemm(y, x, w); });
  add_small("add_rms_norm", {residual, y, residual, y},
            [=, this] { ops_->add_rms_norm(y, residual, y, norm, eps); });
}
void StepRecorder::rope_store(Tensor q, Tensor k, Tensor v, const Batch& batch, Tensor cos_sin,
                              KvCache cache) {
  note_small("rope_store", {q, k, v, q, k, v},
             [=, this] { ops_->rope_store(q, k, v, batch, cos_sin, cache); });
}
void StepRecorder::qk_norm_rope_store(Tensor q, Tensor k, Tensor v, Tensor q_norm, Tensor k_norm,
                                      float eps, const Batch& batch, Tensor cos_sin,
                                      KvCache cache) {
  note_small("qk_norm_rope_store", {q, k, v, q, k, v}, [=, this] {
    ops_->qk_norm_rope_store(q, k, v, q_norm, k_norm, eps, batch, cos_sin, cache);
  });
}

}  // namespace nanovllm::cli
