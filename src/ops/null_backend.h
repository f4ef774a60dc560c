// NullBackend: does nothing, on no memory. A model's forward pass over it, with a measuring Arena,
// tells what a step's workspace needs without touching a device (`nanovllm inspect`, memory
// planning).
#pragma once

#include "ops/backend.h"

namespace nanovllm {

class NullBackend : public Backend {
 public:
  Device device() const override { return {}; }
  std::string name() const override { return "null"; }
  MemoryInfo memory() const override { return {}; }
  Buffer allocate(size_t) override { return {}; }
  Buffer allocate_host(size_t) override { return {}; }
  void copy(Tensor, Tensor) override {}
  void synchronize() override {}
  int64_t max_logits_rows() const override { return 1; }
  size_t scratch_bytes(const OperandLimits&) const override { return 0; }
  size_t weight_bytes(WeightFormat format, int64_t n, int64_t k) const override {
    return static_cast<size_t>(n * k) * size_of(dtype_of(format));
  }
  Weight weight_view(std::byte* data, WeightFormat format, int64_t n, int64_t k) const override {
    return {Tensor(data, dtype_of(format), {n, k}), format};
  }
  void load(Tensor, std::span<const Tensor>) override {}
  void gemm(Tensor, Tensor, Weight) override {}
  void embedding(Tensor, Tensor, Weight, int64_t) override {}
  void feed_tokens(Tensor, Tensor, Tensor, Tensor, Tensor) override {}
  void gather_rows(Tensor, Tensor, Tensor) override {}
  void add(Tensor, Tensor) override {}
  void add_bias(Tensor, Tensor) override {}
  void rms_norm(Tensor, Tensor, Tensor, float) override {}
  void rotary_embedding(Tensor, Tensor, Tensor, Tensor) override {}
  void store_kv(KvCache, Tensor, Tensor, Tensor) override {}
  void attention(Tensor, Tensor, KvCache, const Batch&, float, int64_t) override {}
  void silu_and_mul(Tensor, Tensor) override {}
  void moe_route(Tensor, Tensor, Tensor, bool) override {}
  void moe_mlp(Tensor, Tensor, Tensor, Tensor, Weight, Weight, const MoeWorkspace&) override {}
  void apply_token_masks(Tensor, Tensor, Tensor) override {}
  void bias_logits(Tensor, Tensor, const Batch&, int64_t) override {}
  void apply_penalties(Tensor, const SamplingBatch&, Tensor, Tensor) override {}
  void sample(Tensor, Tensor, const SamplingBatch&) override {}
  void top_logprobs(Tensor, Tensor, Tensor, Tensor, Tensor) override {}
};

}  // namespace nanovllm
