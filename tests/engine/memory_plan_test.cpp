// The memory plan: every step within the limits fits what was planned, and the KV cache gets what
// the options and the machine allow.
#include "engine/memory_plan.h"

#include <array>
#include <random>

#include <gtest/gtest.h>

#include "nanovllm/params.h"

#include "engine/idle_backend.h"
#include "engine/model_runner.h"
#include "engine/test_grammars.h"

namespace nanovllm {
namespace {

/// The features that the sequences of a step ask of their sampling.
enum class Asks {
  nothing,
  filters,
  biases,
  penalties,
  grammars,
  logprobs,
  prompt_logprobs,
  everything
};
constexpr std::array kAllAsks{Asks::nothing,         Asks::filters,   Asks::biases,
                              Asks::penalties,       Asks::grammars,  Asks::logprobs,
                              Asks::prompt_logprobs, Asks::everything};

/// One engine's limits, and the largest and some other steps within them.
class StepsWithinLimits {
 public:
  StepsWithinLimits(ModelConfig model, EngineConfig config, int64_t max_logits_rows, int ranks,
                    int64_t rows_worth_halving)
      : block_size_(config.block_size) {
    auto backend = std::make_unique<IdleBackend>(counts_, max_logits_rows);
    MemoryPlan plan = plan_memory(*backend, model, config, DType::f32, {0, ranks});
    plan.limits.rows_worth_halving = rows_worth_halving;
    limits_ = plan.limits;
    runner_ = std::make_unique<ModelRunner>(
        std::move(backend), std::make_unique<NullCommunicator>(0, ranks), model, config, plan);
  }

  int64_t most_sequences() const {
    return std::min(limits_.max_num_seqs, limits_.max_num_batched_tokens);
  }
  /// `count` sequences at the longest, one row each.
  Plan decodes(int64_t count, Asks asks) {
    Plan plan;
    for (int64_t i = 0; i < count; ++i) add(plan, limits_.max_model_len - 1, 1, true, asks);
    return plan;
  }
  /// All tokens of the budget, divided among `count` prompts; of those, `sampling` sample.
  Plan prompts(int64_t count, int64_t sampling, Asks asks) {
    Plan plan;
    const int64_t tokens = limits_.max_num_batched_tokens;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t share = tokens * (i + 1) / count - tokens * i / count;
      add(plan, 0, std::min(share, limits_.max_model_len), i < sampling, asks);
    }
    return plan;
  }
  /// Three times: eagerly, recorded, replayed.
  void run(const Plan& plan) {
    for (int i = 0; i < 3; ++i) {
      runner_->launch(plan);
      if (plan.needs_masks()) runner_->finish_launch(plan);
      runner_->wait();
    }
  }
  const IdleCounts& counts() const { return counts_; }

 private:
  void add(Plan& plan, int64_t start, int64_t tokens, bool samples, Asks asks) {
    auto s = std::make_unique<Sequence>();
    s->token_ids.assign(static_cast<size_t>(start + tokens + (samples ? 0 : 1)), 1);
    s->num_prompt_tokens = s->num_tokens() - (start > 0 ? 1 : 0);
    s->block_table.assign(static_cast<size_t>((start + tokens - 1) / block_size_ + 1), 0);
    const auto wants = [asks](Asks one) { return asks == one || asks == Asks::everything; };
    if (wants(Asks::filters)) s->params.top_k = 5;
    if (wants(Asks::grammars) && (asks == Asks::grammars || sequences_.size() % 2 == 0))
      s->matcher = std::make_unique<HashMatcher>(1, 1536, 0);
    if (wants(Asks::logprobs)) s->params.logprobs = kMaxLogprobs;
    if (wants(Asks::prompt_logprobs)) s->params.prompt_logprobs = kMaxLogprobs;
    if (wants(Asks::penalties)) s->params.repetition_penalty = 2;
    if (wants(Asks::biases)) {
      s->params.min_tokens = 1'000'000;
      s->stop_token_ids.assign(kMaxStopTokenIds + kMaxEosIds, 1);
      s->rules.biases.assign(kMaxLogitBias + 2 * kMaxBadWords, {});
    }
    plan.sequences.push_back({.sequence = s.get(),
                              .start = start,
                              .num_tokens = tokens,
                              .samples = samples,
                              .is_new = start == 0});
    plan.num_tokens += tokens;
    sequences_.push_back(std::move(s));
  }

  IdleCounts counts_;
  int64_t block_size_;
  StepLimits limits_;
  std::vector<std::unique_ptr<Sequence>> sequences_;
  std::unique_ptr<ModelRunner> runner_;
};

ModelConfig wide_model(bool is_mixture) {
  ModelConfig model = idle_model();
  model.vocab_size = 1536;  // logits outweigh activations, as in real models
  model.num_attention_heads = model.num_key_value_heads = 4;
  if (is_mixture) {
    model.architecture = "Qwen3MoeForCausalLM";
    model.moe.emplace();
    model.moe->num_experts = model.moe->num_experts_per_tok = 4;
    model.moe->moe_intermediate_size = 8;
  }
  return model;
}

class MemoryPlanFuzz : public testing::Test {
 protected:
  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[std::uniform_int_distribution<size_t>(0, values.size() - 1)(random_)];
  }
  int64_t up_to(int64_t most) { return std::uniform_int_distribution<int64_t>(1, most)(random_); }

  std::mt19937 random_{20261123};
};

TEST_F(MemoryPlanFuzz, EveryStepFitsWhateverTheBudgetTheSequencesAndTheFeatures) {
  int recordings = 0;
  for (int64_t budget : {1, 2, 3, 7, 9, 33, 65, 100, 129, 200, 257, 300, 511, 700})
    for (int64_t seqs : {1, 2, 3, 7, 20, 99, 128, 130, 513, 800}) {
      EngineConfig config;
      config.block_size = 64;
      config.max_model_len = pick<int64_t>({64, 700, 1000});
      config.max_num_batched_tokens = budget;
      config.max_num_seqs = seqs;
      config.num_gpu_blocks_override = 16;
      config.enforce_eager = pick({false, false, true});
      config.decode_micro_batches = pick({0, 1, 2});
      const int64_t chunk = pick<int64_t>({1, 7, 64, 512}), halving = pick<int64_t>({0, 2, 32});
      const int ranks = pick({1, 1, 2, 4});
      SCOPED_TRACE(testing::Message()
                   << "budget " << budget << ", sequences " << seqs << ", max_model_len "
                   << config.max_model_len << ", micro-batches " << config.decode_micro_batches
                   << ", eager " << config.enforce_eager << ", rows of logits at once " << chunk
                   << ", ranks " << ranks << ", halves from " << halving);
      StepsWithinLimits steps(wide_model(pick({false, true})), config, chunk, ranks, halving);
      const int64_t most = steps.most_sequences();
      for (const Asks asks : kAllAsks) {
        SCOPED_TRACE(testing::Message() << "asks for " << static_cast<int>(asks));
        for (const int64_t count : {most, up_to(most)}) {
          ASSERT_NO_THROW(steps.run(steps.decodes(count, asks))) << count << " decodes";
          const int64_t sampling = up_to(count);
          ASSERT_NO_THROW(steps.run(steps.prompts(count, sampling, asks)))
              << count << " prompts, " << sampling << " sample";
        }
        ASSERT_NO_THROW(steps.run(steps.prompts(1, 1, asks))) << "one prompt";
      }
      recordings += steps.counts().recordings;
    }
  EXPECT_GT(recordings, 100);
}

/// A host with this much memory.
class Host final : public NullBackend {
 public:
  explicit Host(size_t bytes) : bytes_(bytes) {}
  MemoryInfo memory() const override { return {bytes_, bytes_}; }

 private:
  size_t bytes_;
};

/// 4 MiB a token, and 4 bytes for which token it is.
ModelConfig large_cache_model() {
  ModelConfig model = idle_model();
  model.num_hidden_layers = 64;
  model.num_attention_heads = model.num_key_value_heads = 64;
  model.head_dim = 128;
  model.max_position_embeddings = 1 << 20;
  return model;
}
constexpr size_t kPlenty = size_t{1} << 40;

MemoryPlan plan_on_host(const EngineConfig& config, size_t memory = kPlenty, int ranks = 1) {
  Host host(memory);
  return plan_memory(host, large_cache_model(), config, DType::f32, {0, ranks}, ranks);
}
std::string refusal_on_host(const EngineConfig& config, ErrorKind kind, size_t memory = kPlenty) {
  try {
    plan_on_host(config, memory);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind);
    return error.what();
  }
  return "";
}

TEST(MemoryPlan, RanksOnCpusTakeFourGigabytesTogether) {
  EngineConfig config;
  config.block_size = 8;
  // Blocks of 8 tokens, of which every rank has a quarter of the keys and all ids.
  EXPECT_EQ(plan_on_host(config).kv_cache(), 127 * ((size_t{32} << 20) + 32));
  EXPECT_EQ(plan_on_host(config, kPlenty, 4).kv_cache(), 127 * ((size_t{8} << 20) + 32));
}

TEST(MemoryPlan, AContextBeyondTheCpusCacheNamesTheOptionThatAllowsIt) {
  EngineConfig config;
  config.block_size = 8;
  config.max_model_len = 1016;
  EXPECT_EQ(plan_on_host(config).num_blocks, 127);
  config.max_model_len = 1017;
  EXPECT_EQ(refusal_on_host(config, ErrorKind::invalid_argument),
            "max_model_len 1017 needs a KV cache of 4294971392 bytes, and a CPU's has 4294967296 "
            "at most unless it is given: --cpu-kvcache-bytes 4294971392, or --max-model-len 1016 "
            "or less");
  config.cpu_kvcache_bytes = 4294971392;
  EXPECT_EQ(plan_on_host(config).num_blocks, 128);
}

TEST(MemoryPlan, AContextBeyondTheMachineIsNotEnoughMemory) {
  EngineConfig config;
  config.block_size = 8;
  config.max_model_len = 4096;
  const std::string message = refusal_on_host(config, ErrorKind::device, size_t{8} << 30);
  EXPECT_NE(message.find("not enough memory"), std::string::npos) << message;
}

TEST(MemoryPlan, SlotsFitThirtyTwoBits) {
  EngineConfig config;
  config.block_size = 256;
  config.max_num_seqs = 65536;
  config.max_model_len = 1 << 20;
  config.allow_long_max_model_len = true;
  config.cpu_kvcache_bytes = INT64_MAX / 4;
  const MemoryPlan plan = plan_on_host(config, size_t{1} << 62);
  EXPECT_EQ(plan.num_blocks, INT32_MAX / 256);
}

// Beside other programs on the card: its driver grows, too.
TEST(MemoryPlan, AGpuKeepsAFiftiethOfItselfFree) {
  class Gpu final : public NullBackend {
   public:
    explicit Gpu(size_t free) : free_(free) {}
    Device device() const override { return {Device::cuda, 0}; }
    MemoryInfo memory() const override { return {size_t{100} << 30, free_}; }

   private:
    size_t free_;
  };
  EngineConfig config;
  config.gpu_memory_utilization = 0.9;
  const auto available = [&](size_t free) {
    Gpu gpu(free);
    return plan_memory(gpu, large_cache_model(), config, DType::f32, {}).available;
  };
  EXPECT_EQ(available(size_t{60} << 30), size_t{58} << 30);
  EXPECT_EQ(available(size_t{100} << 30) >> 30, 90u);
}

}  // namespace
}  // namespace nanovllm
