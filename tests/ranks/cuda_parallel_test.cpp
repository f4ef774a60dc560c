// Engines of ranks on GPUs against one rank. Ranks need a GPU each: on a shared one the driver may
// wait for one rank's kernel while it serves another's.
#include "engine/llm_engine.h"
#include "io/quantised/quantize.h"
#include "io/safetensors/checkpoint.h"
#include "ranks/gpu_ranks.h"
#include "ranks/rank_group.h"

namespace nanovllm {
namespace {

using namespace std::chrono_literals;

/// Greedy tokens of a golden model on `runner`.
std::vector<std::vector<int32_t>> answers(std::unique_ptr<Runner> runner, const ModelConfig& model,
                                          const EngineConfig& config) {
  LLMEngine engine(std::move(runner), model, config, nullptr, {});
  SamplingParams params{.temperature = 0, .max_tokens = 40};
  for (int32_t length : {1, 5, 70, 130}) {
    std::vector<int32_t> prompt;
    for (int32_t i = 0; i < length; ++i) prompt.push_back((7 * i + length) % 200);
    engine.add_request(std::move(prompt), params);
  }
  std::vector<std::vector<int32_t>> tokens(4);
  while (!engine.is_finished())
    for (const RequestOutput& output : engine.step())
      if (output.finished)
        tokens[static_cast<size_t>(output.request_id)] = output.outputs[0].token_ids;
  return tokens;
}

TEST(CudaParallel, EnginesOfSeveralRanksAnswerLikeOne) {
  if (devices_for(2).empty()) GTEST_SKIP() << "no two cuda devices here";
  const std::string directory =
      std::string(NANOVLLM_SOURCE_DIR) + "/tests/data/goldens/llama-parallel-biases";
  const ModelConfig model = load_model_config(directory, config_defaults);
  const auto checkpoint = std::make_shared<const Checkpoint>(directory);
  EngineConfig config;
  config.dtype = "f32";
  config.num_gpu_blocks_override = 64;
  for (const bool eager : {true, false}) {
    config.enforce_eager = eager;
    for (const int world : {2, 4, 8}) {
      const auto devices = devices_for(world);
      if (devices.empty()) break;
      auto one = std::make_unique<ModelRunner>(
          make_backend(devices[0], {}), std::make_unique<SingleCommunicator>(), model, config);
      one->load(checkpoint.get(), 0, {});
      const auto expected = answers(std::move(one), model, config);
      for (int again = 0; again < 2; ++again) {
        auto many = std::make_unique<RankGroup>(
            world, [&](int rank) { return make_backend(devices[static_cast<size_t>(rank)], {}); },
            model, config);
        many->load(checkpoint, 0, {});
        EXPECT_EQ(answers(std::move(many), model, config), expected) << world << " ranks";
      }
    }
  }
}

/// An engine of random weights on these GPUs, with as many layers of a shape as are asked for.
std::unique_ptr<LLMEngine> make_engine(const std::vector<std::string>& devices, int64_t layers,
                                       const std::vector<CudaLimits>& limits = {},
                                       const char* quantization = "auto",
                                       const std::string& shape = "qwen3-0.6b") {
  ModelConfig model = load_model_config(
      std::string(NANOVLLM_SOURCE_DIR) + "/bench/configs/" + shape, config_defaults);
  choose_quantization(model, quantization, false);
  model.num_hidden_layers = layers;
  EngineConfig config;
  config.num_gpu_blocks_override = 1024;
  config.max_model_len = 2048;
  config.enable_prefix_caching = false;
  auto group = std::make_unique<RankGroup>(
      static_cast<int>(devices.size()),
      [&](int rank) {
        const auto at = static_cast<size_t>(rank);
        auto backend = make_backend(devices[at], {});
        if (at < limits.size()) limit_cuda(*backend, limits[at]);
        return backend;
      },
      model, config);
  group->load(nullptr, 3, {});
  return std::make_unique<LLMEngine>(std::move(group), model, config, nullptr,
                                     std::vector<int32_t>{});
}

/// Ranks that sum, but for the last one, which stays away: the others' kernels wait on their GPUs.
void run_with_an_absent_rank(const std::vector<std::string>& devices) {
  const auto group = std::make_shared<ThreadGroup>(static_cast<int>(devices.size()), 3s);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < group->world_size(); ++rank)
    threads.emplace_back([&, rank] {
      try {
        const auto backend = make_backend(devices[static_cast<size_t>(rank)], {});
        const auto comm = open_communicator(*backend, group, rank);
        const Buffer memory = backend->allocate(1 << 20);
        const Tensor x(memory.get(), DType::bf16, {1, 1 << 19}, backend->device());
        backend->synchronize();
        group->barrier(rank);
        if (rank + 1 == group->world_size()) {
          std::this_thread::sleep_for(1s);
          fail(ErrorKind::device, "it had enough");
        }
        for (int i = 0; i < 50; ++i) comm->all_reduce(x);
        backend->synchronize();
        group->barrier(rank);
      } catch (const Error& error) {
        group->fail({rank, error.kind(), error.what()});
      }
    });
  for (std::thread& thread : threads) thread.join();
  if (const auto failure = group->failure())
    throw Error(failure->kind, describe(*failure, group->world_size()));
}

/// The answers that `requests` prompts get, all at once or one after another: tokens and log
/// probabilities.
std::vector<std::vector<std::pair<int32_t, float>>> scores(LLMEngine& engine, int32_t requests,
                                                           bool at_once, float temperature) {
  SamplingParams params{.temperature = temperature, .max_tokens = 24};
  params.seed = 5;
  params.ignore_eos = true;
  params.logprobs = 1;
  std::vector<std::vector<std::pair<int32_t, float>>> results;
  const auto drain = [&] {
    while (!engine.is_finished())
      for (const RequestOutput& output : engine.step()) {
        if (!output.finished) continue;
        EXPECT_EQ(output.error, "");
        auto& result = results[static_cast<size_t>(output.request_id) % results.size()];
        for (size_t i = 0; i < output.outputs[0].token_ids.size(); ++i)
          result.emplace_back(output.outputs[0].token_ids[i],
                              output.outputs[0].logprobs[i].front().logprob);
      }
  };
  results.resize(static_cast<size_t>(requests));
  for (int32_t r = 0; r < requests; ++r) {
    std::vector<int32_t> prompt;
    for (int32_t i = 0; i < 40 + 97 * r; ++i) prompt.push_back((31 * i + r) % 5000);
    engine.add_request(std::move(prompt), params);
    if (!at_once) drain();
  }
  drain();
  return results;
}

// A decode step of few rows is one kernel, which exchanges sums inside; one of many is operations
// with sums between them.
TEST(CudaParallel, AFewRowsGetTheBitsOfMany) {
  if (devices_for(2).empty()) GTEST_SKIP() << "no two cuda devices here";
  constexpr int32_t kRequests = 12;
  for (const int world : {2, 4, 8}) {
    const auto devices = devices_for(world);
    if (devices.empty()) break;
    for (const auto& [shape, quantization] : {std::pair{"qwen3-0.6b", "auto"},
                                              {"qwen3-0.6b", "int4"},
                                              {"qwen3-30b-a3b", "auto"},
                                              {"qwen3-30b-a3b", "int4"}})
      for (const int64_t layers : {1, 4}) {
        const auto engine = make_engine(devices, layers, {}, quantization, shape);
        for (const float temperature : {0.0F, 0.8F}) {
          const auto many = scores(*engine, kRequests, true, temperature);
          EXPECT_EQ(scores(*engine, kRequests, false, temperature), many)
              << shape << ", " << quantization << ", " << layers << " layers, " << world
              << " ranks, temperature " << temperature;
        }
      }
  }
}

// The exchange's words say of which layer they are by an epoch, which starts again behind the last.
TEST(CudaParallel, EpochsMayStartAgainOnAllRanks) {
  const auto devices = devices_for(2);
  if (devices.empty()) GTEST_SKIP() << "no two cuda devices here";
  constexpr int32_t kRequests = 7;
  for (const int64_t layers : {1, 3}) {
    const auto expected = scores(*make_engine(devices, layers), kRequests, true, 0.8F);
    const auto engine = make_engine(devices, layers, {{.last_epoch = 10}, {.last_epoch = 10}});
    for (const bool at_once : {true, false, true})
      EXPECT_EQ(scores(*engine, kRequests, at_once, 0.8F), expected) << layers << " layers";
  }
}

TEST(CudaParallel, RanksOfUnlikeGpusAnswerLikeThoseOfLikeOnes) {
  const auto devices = devices_for(2);
  if (devices.empty()) GTEST_SKIP() << "no two cuda devices here";
  constexpr int32_t kRequests = 12;
  const auto expected = scores(*make_engine(devices, 2), kRequests, true, 0.8F);
  for (const CudaLimits& limits :
       {CudaLimits{.num_sms = 60}, CudaLimits{.lacks_cooperative_launches = true}}) {
    const auto engine = make_engine(devices, 2, {{}, limits});
    for (const bool at_once : {true, false})
      EXPECT_EQ(scores(*engine, kRequests, at_once, 0.8F), expected);
  }
}

// Registers unpack int4 weights in the kernel of all layers: where one rank's do not, none may take
// it, for it waits for the others' words.
TEST(CudaParallel, ARankWithUnevenWeightsKeepsTheOthersFromTheOneKernel) {
  const auto devices = devices_for(2);
  if (devices.empty()) GTEST_SKIP() << "no two cuda devices here";
  constexpr int32_t kRequests = 3;
  const auto expected = scores(*make_engine(devices, 2, {}, "int4"), kRequests, true, 0.8F);
  const auto engine = make_engine(devices, 2, {{}, {.has_uneven_weights = true}}, "int4");
  EXPECT_EQ(scores(*engine, kRequests, true, 0.8F), expected);
}

TEST(CudaParallel, TwoEnginesRunSideBySide) {
  const auto devices = devices_for(2);
  if (devices.empty()) GTEST_SKIP() << "no two cuda devices here";
  constexpr int32_t kRequests = 12;
  const std::unique_ptr<LLMEngine> engines[] = {make_engine(devices, 3), make_engine(devices, 3)};
  const auto expected = scores(*engines[0], kRequests, true, 0.8F);
  std::vector<std::thread> threads;
  for (const auto& engine : engines)
    threads.emplace_back([&] {
      for (int again = 0; again < 4; ++again)
        EXPECT_EQ(scores(*engine, kRequests, again % 2 == 0, 0.8F), expected);
    });
  for (std::thread& thread : threads) thread.join();
}

// A rank whose device fails takes the group along, and gives the memory of all GPUs back.
TEST(CudaParallel, ARankThatFailsEndsTheOthersInTime) {
  const auto devices = devices_for(2);
  if (devices.empty()) GTEST_SKIP() << "no two cuda devices here";
  const auto free_bytes = [&] { return make_backend(devices[1], {})->memory().free; };
  const size_t before = free_bytes();
  const auto begin = std::chrono::steady_clock::now();
  try {
    run_with_an_absent_rank(devices);
    ADD_FAILURE() << "it should have failed";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("rank 1 of 2"), std::string::npos) << error.what();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 10s);
  EXPECT_GT(free_bytes() + (64 << 20), before);
}

}  // namespace
}  // namespace nanovllm
