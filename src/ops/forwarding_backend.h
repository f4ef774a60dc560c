// ForwardingBackend: does what another backend does. A class that stands between the engine and a
// device derives from it and overrides only the operations that it is there for.
#pragma once

#include <utility>

#include "ops/backend.h"

namespace nanovllm {

class ForwardingBackend : public Backend {
 public:
  explicit ForwardingBackend(std::unique_ptr<Backend> ops) : ops_(std::move(ops)) {}

  Device device() const override { return ops_->device(); }
  std::string name() const override { return ops_->name(); }
  MemoryInfo memory() const override { return ops_->memory(); }
  Buffer allocate(size_t bytes) override { return ops_->allocate(bytes); }
  Buffer allocate_host(size_t bytes) override { return ops_->allocate_host(bytes); }
  void copy(Tensor dst, Tensor src) override { ops_->copy(dst, src); }
  void copy_ahead(Tensor dst, Tensor src) override { ops_->copy_ahead(dst, src); }
  void synchronize() override { ops_->synchronize(); }
  bool is_asynchronous() const override { return ops_->is_asynchronous(); }
  std::unique_ptr<Fence> make_fence() override { return ops_->make_fence(); }
  bool has_graphs() const override { return ops_->has_graphs(); }
  std::unique_ptr<Graph> capture(const std::function<void()>& body) override {
    return ops_->capture(body);
  }
  int64_t max_logits_rows() const override { return ops_->max_logits_rows(); }
  size_t scratch_bytes(const OperandLimits& largest) const override {
    return ops_->scratch_bytes(largest);
  }
  void reserve(const OperandLimits& largest) override { ops_->reserve(largest); }
  void begin_step(const Batch& batch) override { ops_->begin_step(batch); }
  bool has_e4m3_cache() const override { return ops_->has_e4m3_cache(); }
  int micro_batches_for(const DecodeSize& size) const override {
    return ops_->micro_batches_for(size);
  }
  void run_micro_batches(int micro_batches, const std::function<void(int)>& body) override {
    ops_->run_micro_batches(micro_batches, body);
  }

  bool keeps(WeightFormat format, int64_t n, int64_t k, bool stacked) const override {
    return ops_->keeps(format, n, k, stacked);
  }
  size_t weight_bytes(WeightFormat format, int64_t n, int64_t k) const override {
    return ops_->weight_bytes(format, n, k);
  }
  Weight weight_view(std::byte* data, WeightFormat format, int64_t n, int64_t k) const override {
    return ops_->weight_view(data, format, n, k);
  }
  void load(Tensor dst, std::span<const Tensor> parts) override { ops_->load(dst, parts); }
  void load_quantised(Weight dst, const QuantizedRows& rows) override {
    ops_->load_quantised(dst, rows);
  }
  void load_all(std::span<const WeightSource> weights, const SourceReader& read,
                const std::function<void(size_t)>& loaded) override {
    ops_->load_all(weights, read, loaded);
  }

  void gemm(Tensor y, Tensor x, Weight w) override { ops_->gemm(y, x, w); }
  GemmTuning tune_gemm(Tensor y, Tensor x, Weight w) override { return ops_->tune_gemm(y, x, w); }
  void embedding(Tensor y, Tensor tokens, Weight table, int64_t first_row) override {
    ops_->embedding(y, tokens, table, first_row);
  }
  void feed_tokens(Tensor tokens, Tensor source, Tensor sampled, Tensor slots,
                   Tensor slot_tokens) override {
    ops_->feed_tokens(tokens, source, sampled, slots, slot_tokens);
  }
  void gather_rows(Tensor y, Tensor x, Tensor rows) override { ops_->gather_rows(y, x, rows); }
  void add(Tensor x, Tensor y) override { ops_->add(x, y); }
  void add_bias(Tensor x, Tensor bias) override { ops_->add_bias(x, bias); }
  void rms_norm(Tensor y, Tensor x, Tensor w, float eps) override { ops_->rms_norm(y, x, w, eps); }
  void rotary_embedding(Tensor q, Tensor k, Tensor positions, Tensor cos_sin) override {
    ops_->rotary_embedding(q, k, positions, cos_sin);
  }
  void store_kv(KvCache cache, Tensor k, Tensor v, Tensor slot_mapping) override {
    ops_->store_kv(cache, k, v, slot_mapping);
  }
  void attention(Tensor out, Tensor q, KvCache cache, const Batch& batch, float scale,
                 int64_t window) override {
    ops_->attention(out, q, cache, batch, scale, window);
  }
  void silu_and_mul(Tensor y, Tensor gate_up) override { ops_->silu_and_mul(y, gate_up); }
  void moe_route(Tensor weights, Tensor ids, Tensor logits, bool normalise) override {
    ops_->moe_route(weights, ids, logits, normalise);
  }
  void moe_mlp(Tensor y, Tensor x, Tensor weights, Tensor ids, Weight gate_up, Weight down,
               const MoeWorkspace& work) override {
    ops_->moe_mlp(y, x, weights, ids, gate_up, down, work);
  }
  void bias_logits(Tensor logits, Tensor biases, const Batch& batch, int64_t first_row) override {
    ops_->bias_logits(logits, biases, batch, first_row);
  }
  void apply_penalties(Tensor logits, const SamplingBatch& params, Tensor slot_tokens,
                       Tensor block_tables) override {
    ops_->apply_penalties(logits, params, slot_tokens, block_tables);
  }
  void apply_token_masks(Tensor logits, Tensor mask_rows, Tensor masks) override {
    ops_->apply_token_masks(logits, mask_rows, masks);
  }
  void sample(Tensor token_ids, Tensor logits, const SamplingBatch& params) override {
    ops_->sample(token_ids, logits, params);
  }
  void top_logprobs(Tensor ids, Tensor logprobs, Tensor ranks, Tensor logits,
                    Tensor chosen) override {
    ops_->top_logprobs(ids, logprobs, ranks, logits, chosen);
  }

  void gemm_silu_and_mul(Tensor y, Tensor gate_up, Tensor x, Weight w) override {
    ops_->gemm_silu_and_mul(y, gate_up, x, w);
  }
  void add_rms_norm(Tensor y, Tensor residual, Tensor x, Tensor w, float eps,
                    Weight reader) override {
    ops_->add_rms_norm(y, residual, x, w, eps, reader);
  }
  void gemm_add_rms_norm(Tensor y, Tensor residual, Tensor x, Weight w, Tensor norm, float eps,
                         Weight reader) override {
    ops_->gemm_add_rms_norm(y, residual, x, w, norm, eps, reader);
  }
  void moe_router(Tensor weights, Tensor ids, Tensor logits, Tensor x, Weight w, bool normalise,
                  Tensor slot_mapping) override {
    ops_->moe_router(weights, ids, logits, x, w, normalise, slot_mapping);
  }
  void rope_store(Tensor q, Tensor k, Tensor v, const Batch& batch, Tensor cos_sin,
                  KvCache cache) override {
    ops_->rope_store(q, k, v, batch, cos_sin, cache);
  }
  void qk_norm_rope_store(Tensor q, Tensor k, Tensor v, Tensor q_norm, Tensor k_norm, float eps,
                          const Batch& batch, Tensor cos_sin, KvCache cache) override {
    ops_->qk_norm_rope_store(q, k, v, q_norm, k_norm, eps, batch, cos_sin, cache);
  }
  bool fused_gemm_sample(Tensor token_ids, Tensor x, Weight w,
                         const SamplingBatch& params) override {
    return ops_->fused_gemm_sample(token_ids, x, w, params);
  }
  bool fused_gemm_qk_norm_rope_store(Tensor qkv, Tensor q, Tensor k, Tensor v, Tensor x, Weight w,
                                     Tensor q_norm, Tensor k_norm, float eps, const Batch& batch,
                                     Tensor cos_sin, KvCache cache) override {
    return ops_->fused_gemm_qk_norm_rope_store(qkv, q, k, v, x, w, q_norm, k_norm, eps, batch,
                                               cos_sin, cache);
  }
  bool fused_rope_store_attention(Tensor out, Tensor q, Tensor k, Tensor v, const HeadNorms& norms,
                                  const Batch& batch, Tensor cos_sin, KvCache cache, float scale,
                                  int64_t window) override {
    return ops_->fused_rope_store_attention(out, q, k, v, norms, batch, cos_sin, cache, scale,
                                            window);
  }
  bool decoder_layers(Tensor x, Tensor residual, const DecoderStack& stack,
                      std::span<const KvCache> caches, const Batch& batch) override {
    return ops_->decoder_layers(x, residual, stack, caches, batch);
  }

 protected:
  const std::unique_ptr<Backend> ops_;
};

}  // namespace nanovllm
