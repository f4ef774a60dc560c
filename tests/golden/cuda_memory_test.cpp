// The ways of engines with a GPU's memory: they share it as they are told, say what is missing, and
// give all of it back.

#include "llm_rig.h"

namespace nanovllm {
namespace {

constexpr const char* kModel = NANOVLLM_SOURCE_DIR "/bench/configs/qwen3-0.6b";

class CudaMemory : public testing::Test {
 protected:
  void SetUp() override {
    SKIP_WITHOUT(kTargets[3], kModel);
    config_ = config_for(kTargets[3]);
    config_.load_format = "dummy";
    total_ = free_bytes(1.0);
  }
  /// The memory that an engine would get of a GPU that is nobody else's: `share` of it at most.
  static int64_t free_bytes(double share) {
    return inspect(kModel, {.device = "cuda", .gpu_memory_utilization = share}).available_bytes;
  }
  static std::vector<int32_t> answer(LLM& llm) {
    SamplingParams params = greedy(20);
    params.ignore_eos = true;
    std::vector<int32_t> tokens;
    const std::vector<Prompt> prompts(24, Prompt(ids(60)));
    for (const RequestOutput& output : llm.generate(prompts, params))
      tokens.insert(tokens.end(), output.outputs[0].token_ids.begin(),
                    output.outputs[0].token_ids.end());
    return tokens;
  }
  static int64_t bytes_of(const LLM& llm) {
    const EngineInfo& info = llm.info();
    return info.weight_bytes + info.workspace_bytes + info.kv_cache_bytes;
  }
  void expect_refusal(const EngineConfig& config, const std::vector<std::string>& parts) {
    try {
      const LLM llm(kModel, config);
      ADD_FAILURE() << "it started";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::device);
      expect_contains(error.what(), parts);
    }
  }

  // The memory that a driver keeps for itself, and that another program may take in the meantime.
  static constexpr int64_t kSlack = int64_t{256} << 20;
  EngineConfig config_;
  int64_t total_ = 0;
};

TEST_F(CudaMemory, IsBackAfterAnEngine) {
  { LLM first(kModel, config_); }  // the driver loads what it will keep
  const int64_t before = free_bytes(1.0);
  for (int i = 0; i < 3; ++i) {
    config_.enforce_eager = i == 1;
    LLM llm(kModel, config_);
    EXPECT_FALSE(answer(llm).empty());
    EXPECT_LT(free_bytes(1.0), before - bytes_of(llm) + kSlack) << "the engine has it";
  }
  EXPECT_GT(free_bytes(1.0), before - kSlack);
}

TEST_F(CudaMemory, IsSharedByEnginesThatAreToldTheirPart) {
  config_.gpu_memory_utilization = 0.3;
  const int64_t part = free_bytes(0.3);
  LLM one(kModel, config_), two(kModel, config_), three(kModel, config_);
  for (const LLM* llm : {&one, &two, &three}) {
    EXPECT_LE(bytes_of(*llm), part);
    EXPECT_GT(bytes_of(*llm), part - part / 100);
  }
  const std::vector<int32_t> tokens = answer(one);
  EXPECT_EQ(answer(two), tokens);
  EXPECT_EQ(answer(three), tokens);
  // A fourth gets what is left.
  config_.gpu_memory_utilization = 0.9;
  LLM four(kModel, config_);
  EXPECT_LT(bytes_of(four), part);
  EXPECT_EQ(answer(four), tokens);
}

TEST_F(CudaMemory, ThatIsMissingIsShownAsATable) {
  config_.num_gpu_blocks_override = 10'000'000;
  expect_refusal(config_,
                 {"not enough memory on cuda:0", "weights", "workspace",
                  "KV cache, 10000000 blocks as asked for", "needed, at least",
                  "available: 20 % of it all, or what is free", "ways out: a KV cache of"});
  config_.num_gpu_blocks_override = 0;
  config_.gpu_memory_utilization = 0.001;
  expect_refusal(
      config_,
      {"not enough memory on cuda:0", "one sequence of max_model_len 4096",
       "ways out: a smaller model, or quantization int4; a higher --gpu-memory-utilization"});
  EXPECT_GT(free_bytes(1.0), total_ - kSlack) << "a refused engine keeps nothing";
}

}  // namespace
}  // namespace nanovllm
