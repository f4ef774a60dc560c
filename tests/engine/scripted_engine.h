// An LLMEngine over a device that samples from a script.
#pragma once

#include <climits>
#include <cstring>
#include <map>
#include <memory>

#include <gtest/gtest.h>

#include "engine/llm_engine.h"
#include "engine/model_runner.h"
#include "ops/null_backend.h"

namespace nanovllm {

/// Samples script[seed][position], or token 1; a scripted -1 stands for logits that are not finite.
/// Host memory, no arithmetic.
class ScriptedBackend : public NullBackend {
 public:
  struct Script {
    std::map<int64_t, std::map<int32_t, int32_t>> tokens;  // by seed, by position
    int fail_after = -1;                                   // steps that succeed; -1: all
    int allocations = INT_MAX;                             // that succeed
    int64_t live = 0;                                      // buffers
    std::vector<int64_t> seeds;                            // of the rows sampled so far
    std::vector<std::vector<int32_t>> allowed;             // by the masks applied so far
  };
  explicit ScriptedBackend(std::shared_ptr<Script> script) : script_(std::move(script)) {}

  std::string name() const override { return "script"; }
  MemoryInfo memory() const override { return {size_t{1} << 30, size_t{1} << 30}; }
  Buffer allocate(size_t bytes) override {
    if (script_->allocations-- == 0) fail(ErrorKind::device, "no {} bytes", bytes);
    ++script_->live;
    return {new std::byte[bytes](), [script = script_](std::byte* data) {
              --script->live;
              delete[] data;
            }};
  }
  Buffer allocate_host(size_t bytes) override { return allocate(bytes); }
  void copy(Tensor dst, Tensor src) override { std::memcpy(dst.data, src.data, src.bytes()); }
  int64_t max_logits_rows() const override { return 2; }
  /// The script is sampled whatever the masks say.
  void apply_token_masks(Tensor logits, Tensor mask_rows, Tensor masks) override {
    for (int64_t i = 0; i < mask_rows.numel(); ++i) {
      const int32_t row = mask_rows.ptr<int32_t>()[i];
      if (row < 0) continue;
      auto& allowed = script_->allowed.emplace_back();
      const int32_t* mask = masks.ptr<int32_t>() + row * masks.shape[1];
      for (int32_t id = 0; id < logits.shape[1]; ++id)
        if (mask[id / 32] >> id % 32 & 1) allowed.push_back(id);
    }
  }
  void sample(Tensor token_ids, Tensor, const SamplingBatch& params) override {
    if (script_->fail_after == 0) throw std::runtime_error("the device is gone");
    if (script_->fail_after > 0) --script_->fail_after;
    for (int64_t i = 0; i < token_ids.shape[0]; ++i) {
      script_->seeds.push_back(params.seed.ptr<int64_t>()[i]);
      const auto& tokens = script_->tokens[script_->seeds.back()];
      const auto at = tokens.find(params.position.ptr<int32_t>()[i]);
      token_ids.ptr<int32_t>()[i] = at == tokens.end() ? 1 : at->second;
    }
  }

 private:
  std::shared_ptr<Script> script_;
};

class LLMEngineTest : public testing::Test {
 protected:
  LLMEngineTest() {
    model_.architecture = "Qwen3ForCausalLM";
    model_.vocab_size = 100;
    model_.hidden_size = model_.head_dim = 8;
    model_.intermediate_size = 8;
    model_.num_hidden_layers = model_.num_attention_heads = model_.num_key_value_heads = 1;
    model_.max_position_embeddings = 64;
    model_.dtype = DType::f32;
    config_.block_size = 8;
    config_.max_num_seqs = 4;
  }
  LLMEngine make(std::shared_ptr<const Tokenizer> tokenizer = nullptr) {
    auto runner =
        std::make_unique<ModelRunner>(std::make_unique<ScriptedBackend>(script_),
                                      std::make_unique<SingleCommunicator>(), model_, config_);
    return LLMEngine(std::move(runner), model_, config_, std::move(tokenizer), {99});
  }
  static SamplingParams params(int64_t seed, int64_t max_tokens) {
    SamplingParams p;
    p.seed = seed;
    p.max_tokens = max_tokens;
    return p;
  }
  static std::map<int64_t, RequestOutput> run(LLMEngine& engine) {
    std::map<int64_t, RequestOutput> last;
    while (!engine.is_finished())
      for (RequestOutput& output : engine.step()) {
        const int64_t id = output.request_id;
        last[id] = std::move(output);
      }
    return last;
  }

  ModelConfig model_;
  EngineConfig config_;
  std::shared_ptr<ScriptedBackend::Script> script_ = std::make_shared<ScriptedBackend::Script>();
};

}  // namespace nanovllm
