// AsyncLLM: many callers, one engine thread.
#include "nanovllm/async_llm.h"

#include <atomic>
#include <condition_variable>
#include <limits>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include <gtest/gtest.h>

namespace nanovllm {
namespace {

EngineConfig demo_config() {
  EngineConfig config;
  config.device = "cpu";
  config.num_threads = 1;
  config.max_model_len = 65536;
  config.allow_long_max_model_len = true;
  config.cpu_kvcache_bytes = int64_t{1} << 30;
  return config;
}
const std::string kDemo = std::string(NANOVLLM_SOURCE_DIR) + "/models/demo";
/// Of an answer that nothing in a test waits for: it takes minutes on any machine.
const SamplingParams kEndless{.max_tokens = 65000, .ignore_eos = true};
constexpr double kPatience = 300;

/// Collects the last output of each request.
class Collector {
 public:
  void take(std::span<RequestOutput> outputs) {
    const std::lock_guard lock(mutex_);
    for (RequestOutput& output : outputs) {
      if (!output.finished) continue;
      EXPECT_EQ(finished_.count(output.request_id), 0u) << "ended twice";
      finished_[output.request_id] = std::move(output);
    }
  }
  std::map<int64_t, RequestOutput> finished() {
    const std::lock_guard lock(mutex_);
    return finished_;
  }

 private:
  std::mutex mutex_;
  std::map<int64_t, RequestOutput> finished_;
};

TEST(AsyncLLM, ManyThreadsGetTheBytesOfGenerateAndNothingIsLost) {
  SamplingParams params;
  params.temperature = 0.7;
  params.max_tokens = 12;
  std::map<int64_t, RequestOutput> alone;
  {
    LLM llm(kDemo, demo_config());
    for (int seed = 0; seed < 8; ++seed) {
      params.seed = seed;
      alone[seed] = llm.generate({"Once upon a time"}, params).front();
    }
  }
  Collector collector;
  AsyncLLM llm(kDemo, demo_config(), {},
               [&](std::span<RequestOutput> step) { collector.take(step); });
  std::mutex mutex;
  std::map<int64_t, int64_t> seeds;
  std::vector<std::thread> threads;
  for (int t = 0; t < 6; ++t)
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      for (int i = 0; i < 40; ++i) {
        SamplingParams own = params;
        own.seed = static_cast<int64_t>(random() % 8);
        own.output_kind = OutputKind::final_only;
        const int64_t id = llm.new_request_id();
        {
          const std::lock_guard lock(mutex);
          seeds[id] = *own.seed;
        }
        llm.add_request(id, "Once upon a time", own);
        if (random() % 4 == 0) llm.abort_request(id);
      }
    });
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(llm.wait_until_idle(kPatience));
  const auto finished = collector.finished();
  ASSERT_EQ(finished.size(), seeds.size());
  int whole = 0;
  for (const auto& [id, output] : finished) {
    const CompletionOutput& expected = alone.at(seeds.at(id)).outputs[0];
    if (output.outputs[0].finish_reason == FinishReason::abort) continue;
    ++whole;
    EXPECT_EQ(output.outputs[0].token_ids, expected.token_ids);
    EXPECT_EQ(output.outputs[0].text, expected.text);
  }
  EXPECT_GT(whole, 100);
  EXPECT_EQ(llm.stats().free_blocks, llm.llm().info().num_blocks);
  EXPECT_EQ(llm.num_live(), 0);
}

TEST(AsyncLLM, RefusesWhatIsNotAcceptableOnTheCallersThread) {
  Collector collector;
  AsyncLLM llm(kDemo, demo_config(), {.max_num_queued_reqs = 2, .max_num_queued_tokens = 0},
               [&](std::span<RequestOutput> step) { collector.take(step); });
  SamplingParams bad;
  bad.temperature = -1;
  EXPECT_THROW(llm.add_request(1, "x", bad), Error);
  SamplingParams many;
  many.n = 3;
  try {
    llm.add_request(2, "x", many);
    ADD_FAILURE() << "three answers went into a queue of two";
  } catch (const QueueFull& error) {
    EXPECT_EQ(error.kind(), ErrorKind::unavailable);
    EXPECT_EQ(error.limit(), QueueFull::Limit::requests);
    EXPECT_NE(std::string(error.what()).find("the queue is full"), std::string::npos)
        << error.what();
  }
  llm.drain();
  EXPECT_FALSE(llm.is_serving());
  EXPECT_THROW(llm.add_request(3, "x"), Error);
  EXPECT_TRUE(llm.wait_until_idle(kPatience));
  EXPECT_TRUE(collector.finished().empty());
}

TEST(AsyncLLM, ADeadlineEndsItsRequestWithTheReason) {
  Collector collector;
  AsyncLLM llm(kDemo, demo_config(), {},
               [&](std::span<RequestOutput> step) { collector.take(step); });
  llm.add_request(7, "Once upon a time", kEndless, {.timeout = 0.05});
  ASSERT_TRUE(llm.wait_until_idle(kPatience));
  const RequestOutput output = collector.finished().at(7);
  EXPECT_EQ(output.outputs[0].finish_reason, FinishReason::abort);
  EXPECT_EQ(output.failure, RequestFailure::deadline);
  EXPECT_EQ(output.error, "the request's deadline has passed");
}

TEST(AsyncLLM, ADeadlineDoesNotEndALaterRequestOfTheSameId) {
  Collector first, second;
  Collector* collector = &first;
  AsyncLLM llm(kDemo, demo_config(), {},
               [&](std::span<RequestOutput> step) { collector->take(step); });
  llm.add_request(7, "Once upon a time", {.max_tokens = 1}, {.timeout = 0.2});
  ASSERT_TRUE(llm.wait_until_idle(kPatience));
  ASSERT_EQ(first.finished().at(7).outputs[0].finish_reason, FinishReason::length);
  collector = &second;
  llm.add_request(7, "Once upon a time", kEndless);
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  EXPECT_EQ(llm.num_live(), 1);
  llm.abort_request(7);
  ASSERT_TRUE(llm.wait_until_idle(kPatience));
  EXPECT_EQ(second.finished().at(7).failure, RequestFailure::none);
}

TEST(AsyncLLM, WaitsUntilIdleForEver) {
  Collector collector;
  AsyncLLM llm(kDemo, demo_config(), {},
               [&](std::span<RequestOutput> step) { collector.take(step); });
  llm.add_request(1, "Once upon a time", {.max_tokens = 20, .ignore_eos = true});
  EXPECT_TRUE(llm.wait_until_idle(std::numeric_limits<double>::infinity()));
  EXPECT_EQ(collector.finished().size(), 1u);
}

TEST(AsyncLLM, AnAbortHoldsBeforeItsRequestIsAdded) {
  Collector collector;
  AsyncLLM llm(kDemo, demo_config(), {},
               [&](std::span<RequestOutput> step) { collector.take(step); });
  const int64_t aborted = llm.new_request_id(), whole = llm.new_request_id();
  llm.abort_request(aborted);
  llm.abort_request(whole + 1);  // which nobody has yet
  llm.add_request(aborted, "Once upon a time", kEndless);
  llm.add_request(whole, "Once upon a time", {.max_tokens = 3});
  llm.add_request(llm.new_request_id(), "Once upon a time", {.max_tokens = 3});
  ASSERT_TRUE(llm.wait_until_idle(kPatience));
  const auto finished = collector.finished();
  EXPECT_EQ(finished.at(aborted).outputs[0].finish_reason, FinishReason::abort);
  EXPECT_TRUE(finished.at(aborted).outputs[0].token_ids.empty());
  EXPECT_NE(finished.at(whole).outputs[0].finish_reason, FinishReason::abort);
  EXPECT_NE(finished.at(whole + 1).outputs[0].finish_reason, FinishReason::abort);
}

TEST(AsyncLLM, EndingItEndsWhatRuns) {
  Collector collector;
  {
    AsyncLLM llm(kDemo, demo_config(), {},
                 [&](std::span<RequestOutput> step) { collector.take(step); });
    for (int64_t id = 0; id < 5; ++id) llm.add_request(id, "Once upon a time", kEndless);
  }
  EXPECT_EQ(collector.finished().size(), 5u);
  for (const auto& [id, output] : collector.finished())
    EXPECT_EQ(output.outputs[0].finish_reason, FinishReason::abort);
}

}  // namespace
}  // namespace nanovllm
