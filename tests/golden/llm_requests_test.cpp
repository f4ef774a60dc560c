// Requests that share an LLM: whose outputs come from where, and how some of them end early.
#include "llm_rig.h"

namespace nanovllm {
namespace {

TEST(LlmRequests, ARequestCanBeAbortedWhereverItIs) {
  EngineConfig config = config_for(kCpu);
  config.max_num_seqs = 1;
  LLM llm(golden("qwen3-tied-gqa"), config);
  const int64_t running = llm.add_request(ids(5), greedy(50)),
                waiting = llm.add_request(ids(6), greedy(50)),
                last = llm.add_request(ids(7), greedy(3));
  llm.step();
  llm.step();
  EXPECT_EQ(llm.stats().running, 1);
  EXPECT_EQ(llm.stats().waiting, 2);
  llm.abort_request(running);
  llm.abort_request(waiting);
  llm.abort_request(waiting);
  llm.abort_request(12345);
  llm.abort_request(-1);
  EXPECT_FALSE(llm.is_finished());
  auto outputs = drain(llm);
  EXPECT_EQ(outputs[running].size(), 1u);
  EXPECT_EQ(outputs[running].back().outputs[0].finish_reason, FinishReason::abort);
  EXPECT_EQ(outputs[running].back().outputs[0].token_ids.size(), 2u);
  EXPECT_EQ(outputs[waiting].size(), 1u);
  EXPECT_EQ(outputs[waiting].back().outputs[0].finish_reason, FinishReason::abort);
  EXPECT_TRUE(outputs[waiting].back().outputs[0].token_ids.empty());
  EXPECT_EQ(outputs[last].back().outputs[0].finish_reason, FinishReason::length);
  llm.abort_request(last);
  EXPECT_TRUE(llm.is_finished());
  EXPECT_TRUE(llm.step().empty());
}

TEST(LlmRequests, GenerateLeavesTheOutputsOfOtherRequestsToStep) {
  LLM llm(golden("qwen3-tied-gqa"), config_for(kCpu));
  SamplingParams delta = greedy(6);
  delta.output_kind = OutputKind::delta;
  const int64_t early = llm.add_request(ids(5), delta),
                refused = llm.add_request(std::vector<int32_t>{}, {}),
                late = llm.add_request(ids(6), greedy(40));
  size_t calls = 0;
  const auto ours =
      llm.generate({ids(7)}, std::vector{greedy(10)}, [&](const RequestOutput& output) {
        EXPECT_EQ(output.prompt_token_ids, ids(7)) << "somebody else's output";
        return ++calls > 0;
      });
  EXPECT_EQ(ours[0].outputs[0].token_ids.size(), 10u);
  EXPECT_EQ(calls, 10u);
  EXPECT_FALSE(llm.is_finished());
  auto outputs = drain(llm);
  ASSERT_EQ(outputs.size(), 3u);
  size_t tokens = 0;
  for (const RequestOutput& output : outputs[early]) tokens += output.outputs[0].token_ids.size();
  EXPECT_EQ(tokens, 6u);
  EXPECT_TRUE(outputs[early].back().finished);
  EXPECT_EQ(outputs[refused].back().outputs[0].finish_reason, FinishReason::error);
  EXPECT_EQ(outputs[late].back().outputs[0].token_ids.size(), 40u);
}

TEST(LlmRequests, AnExceptionOfOnOutputLeavesNothingOfItsCallAndAllOfOthers) {
  LLM llm(golden("qwen3-tied-gqa"), config_for(kCpu));
  const int64_t refused = llm.add_request(std::vector<int32_t>{}, {});
  size_t calls = 0;
  const auto generate = [&] {
    llm.generate({ids(5), ids(6)}, std::vector(2, greedy(10)), [&](const RequestOutput&) -> bool {
      ++calls;
      throw std::out_of_range("no");
    });
  };
  EXPECT_THROW(generate(), std::out_of_range);
  EXPECT_EQ(calls, 1u);
  EXPECT_EQ(llm.stats().running, 0);
  const auto outputs = drain(llm);
  EXPECT_EQ(outputs.size(), 1u);
  EXPECT_EQ(outputs.count(refused), 1u);
}

TEST(LlmRequests, AnOutputThatGenerateSetAsideIsStillToBeFetched) {
  LLM llm(golden("qwen3-tied-gqa"), config_for(kCpu));
  const int64_t refused = llm.add_request(std::vector<int32_t>{}, {});
  llm.generate({ids(7)}, greedy(3));
  EXPECT_FALSE(llm.is_finished()) << "an output is left";
  EXPECT_EQ(drain(llm).count(refused), 1u);
  EXPECT_TRUE(llm.is_finished());
}

TEST(LlmRequests, ACallbackThatSaysNoAbortsWhatIsLeft) {
  LLM llm(golden("qwen3-tied-gqa"), config_for(kCpu));
  const auto outputs = llm.generate({ids(5), ids(6)}, std::vector{greedy(2), greedy(50)},
                                    [](const RequestOutput& output) { return !output.finished; });
  EXPECT_EQ(outputs[0].outputs[0].finish_reason, FinishReason::length);
  EXPECT_EQ(outputs[1].outputs[0].finish_reason, FinishReason::abort);
  EXPECT_LT(outputs[1].outputs[0].token_ids.size(), 4u);
  const auto throws = [&] {
    llm.generate({ids(5)}, std::vector{greedy(50)},
                 [](const RequestOutput&) -> bool { throw std::runtime_error("enough"); });
  };
  EXPECT_THROW(throws(), std::runtime_error);
  // It is gone from the engine, not left to run to its end.
  for (const auto& [id, left] : drain(llm)) {
    EXPECT_EQ(left.back().outputs[0].finish_reason, FinishReason::abort);
    EXPECT_LT(left.back().outputs[0].token_ids.size(), 4u);
  }
  EXPECT_EQ(llm.stats().running, 0);
  EXPECT_EQ(llm.generate({ids(5)}, greedy(3)).front().outputs[0].token_ids.size(), 3u);
}

TEST(LlmRequests, AnEngineMayGoWhileRequestsAreLive) {
  LLM llm(golden("qwen3-tied-gqa"), config_for(kCpu));
  for (int i = 0; i < 5; ++i) llm.add_request(ids(30, i), greedy(50));
  llm.step();
  LLM moved = std::move(llm);
  moved.step();
  llm = LLM(golden("qwen3-tied-gqa"), config_for(kCpu));
  EXPECT_EQ(llm.generate({ids(5)}, greedy(3)).front().outputs[0].token_ids.size(), 3u);
}

}  // namespace
}  // namespace nanovllm
