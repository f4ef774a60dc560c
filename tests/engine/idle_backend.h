// IdleBackend: a NullBackend with memory, fences and graphs, for tests of what drives a device.
// Every operation is done at once and computes nothing; every sampled token is 1.
#pragma once

#include <cstdlib>
#include <cstring>

#include "io/model_config.h"
#include "ops/null_backend.h"

namespace nanovllm {

struct IdleCounts {
  int allocations = 0, synchronizations = 0, recordings = 0, launches = 0;
};

class IdleBackend : public NullBackend {
 public:
  explicit IdleBackend(IdleCounts& counts, int64_t max_logits_rows = 1)
      : counts_(counts), max_logits_rows_(max_logits_rows) {}
  MemoryInfo memory() const override { return {size_t{1} << 30, size_t{1} << 30}; }
  int64_t max_logits_rows() const override { return max_logits_rows_; }
  Buffer allocate(size_t bytes) override {
    ++counts_.allocations;
    auto* data = static_cast<std::byte*>(std::calloc(bytes + 1, 1));
    return {data, [](std::byte* p) { std::free(p); }};
  }
  Buffer allocate_host(size_t bytes) override { return allocate(bytes); }
  bool is_asynchronous() const override { return true; }
  bool has_graphs() const override { return true; }
  void synchronize() override { ++counts_.synchronizations; }
  std::unique_ptr<Fence> make_fence() override { return std::make_unique<OpenFence>(); }
  std::unique_ptr<Graph> capture(const std::function<void()>& body) override {
    ++counts_.recordings;
    body();
    return std::make_unique<CountingGraph>(counts_);
  }
  void copy(Tensor dst, Tensor src) override { std::memcpy(dst.data, src.data, src.bytes()); }
  void sample(Tensor ids, Tensor, const SamplingBatch&) override {
    for (int64_t i = 0; i < ids.numel(); ++i) ids.ptr<int32_t>()[i] = 1;
  }

 private:
  struct OpenFence final : Fence {
    void record() override {}
    void wait() override {}
  };
  struct CountingGraph final : Graph {
    explicit CountingGraph(IdleCounts& c) : counts(c) {}
    void launch() override { ++counts.launches; }
    IdleCounts& counts;
  };
  IdleCounts& counts_;
  int64_t max_logits_rows_;
};

/// One layer and few of everything.
inline ModelConfig idle_model() {
  ModelConfig model;
  model.architecture = "Qwen3ForCausalLM";
  model.vocab_size = 100;
  model.hidden_size = model.head_dim = model.intermediate_size = 8;
  model.num_hidden_layers = model.num_attention_heads = model.num_key_value_heads = 1;
  model.max_position_embeddings = 1024;
  model.dtype = DType::f32;
  return model;
}

}  // namespace nanovllm
