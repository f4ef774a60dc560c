// LLMEngine over a device that samples from a script: what becomes of tokens, and what a failing
// device leaves behind.
#include "engine/llm_engine.h"

#include <map>

#include <gtest/gtest.h>

#include "engine/scripted_engine.h"

namespace nanovllm {
namespace {

TEST_F(LLMEngineTest, LogitsThatAreNotFiniteFailTheirRequestAlone) {
  script_->tokens[7][5] = -1;
  LLMEngine engine = make();
  SamplingParams failing = params(7, 10), fine = params(8, 10);
  failing.logprobs = fine.logprobs = 2;
  engine.add_request({1, 2, 3}, failing);
  engine.add_request({1, 2, 3}, fine);
  const auto outputs = run(engine);
  EXPECT_EQ(outputs.at(0).outputs[0].finish_reason, FinishReason::error);
  EXPECT_NE(outputs.at(0).error.find("not finite"), std::string::npos) << outputs.at(0).error;
  EXPECT_EQ(outputs.at(0).failure, RequestFailure::not_finite);
  EXPECT_EQ(outputs.at(0).outputs[0].token_ids, (std::vector<int32_t>{1, 1}));
  EXPECT_EQ(outputs.at(0).outputs[0].logprobs.size(), 2u) << "one per generated token";
  EXPECT_EQ(outputs.at(1).outputs[0].finish_reason, FinishReason::length);
  EXPECT_EQ(outputs.at(1).outputs[0].token_ids.size(), 10u);
  EXPECT_EQ(outputs.at(1).outputs[0].logprobs.size(), 10u);
}

TEST_F(LLMEngineTest, AFailedStepEndsTheEngineAndSaysTheSameFromThenOn) {
  script_->fail_after = 2;
  LLMEngine engine = make();
  engine.add_request({1, 2, 3}, params(1, 10));
  engine.step();
  engine.step();
  std::string message;
  for (int i = 0; i < 3; ++i) {
    try {
      if (i < 2)
        engine.step();
      else
        engine.add_request({4}, params(2, 1));
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::engine);
      EXPECT_NE(std::string(error.what()).find("the device is gone"), std::string::npos);
      if (i > 0) {
        EXPECT_EQ(error.what(), message);
      }
      message = error.what();
    }
  }
  EXPECT_TRUE(engine.is_finished());  // all live requests are lost
  engine.abort_request(0);
  engine.reset_prefix_cache();
  engine.stats();
}

TEST_F(LLMEngineTest, TheLargestStepOfWhichAllRowsWantLogprobsFindsRoom) {
  model_.vocab_size = 4096;  // logits and the rows they are of are the largest arrays
  model_.hidden_size = 256;
  config_.max_num_batched_tokens = 2;  // as many as the head takes at once
  LLMEngine engine = make();
  SamplingParams all = params(1, 1);
  all.prompt_logprobs = 0;
  engine.add_request({1, 2}, all);
  EXPECT_EQ(run(engine).at(0).outputs[0].finish_reason, FinishReason::length);
}

TEST_F(LLMEngineTest, AnswerIHasTheSeedDerivedFromTheRequestsAndItsNumber) {
  LLMEngine engine = make();
  SamplingParams three = params(7, 6);
  three.n = 3;
  for (int i = 0; i < 3; ++i) script_->tokens[answer_seed(7, i)][4] = 40 + i;
  engine.add_request({1, 2, 3}, three);
  const RequestOutput output = run(engine).at(0);
  ASSERT_EQ(output.outputs.size(), 3u);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(output.outputs[static_cast<size_t>(i)].index, i);
    EXPECT_EQ(output.outputs[static_cast<size_t>(i)].token_ids[1], 40 + i);
  }
  EXPECT_EQ(answer_seed(7, 0), 7);
  EXPECT_NE(answer_seed(7, 1), answer_seed(8, 1));
}

TEST_F(LLMEngineTest, AnswersShareTheFullBlocksOfTheirPrompt) {
  LLMEngine engine = make();
  SamplingParams four = params(7, 2);
  four.n = 4;
  engine.add_request(std::vector<int32_t>(20, 5), four);  // two full blocks of 8
  (void)run(engine);
  EXPECT_EQ(engine.stats().prompt_tokens, 4 * 20);
  EXPECT_EQ(engine.stats().cached_prompt_tokens, 3 * 16);
}

TEST_F(LLMEngineTest, ARequestEndsWithItsLastAnswerAndDeltasNameTheirs) {
  script_->tokens[7][4] = 99;  // EOS: answer 0 ends first
  for (const OutputKind kind : {OutputKind::cumulative, OutputKind::delta}) {
    LLMEngine engine = make();
    SamplingParams two = params(7, 5);
    two.n = 2;
    two.output_kind = kind;
    engine.add_request({1, 2, 3}, two);
    std::vector<size_t> tokens(2), ends(2);
    bool finished = false;
    while (!engine.is_finished())
      for (const RequestOutput& output : engine.step()) {
        EXPECT_FALSE(finished);
        finished = output.finished;
        if (kind == OutputKind::cumulative) {
          EXPECT_EQ(output.outputs.size(), 2u);
        }
        for (const CompletionOutput& answer : output.outputs) {
          const auto i = static_cast<size_t>(answer.index);
          tokens[i] = answer.token_ids.size() + (kind == OutputKind::delta ? tokens[i] : 0);
          if (kind == OutputKind::delta) ends[i] += answer.finished();
        }
      }
    EXPECT_TRUE(finished);
    EXPECT_EQ(tokens, (std::vector<size_t>{2, 5}));
    if (kind == OutputKind::delta) {
      EXPECT_EQ(ends, (std::vector<size_t>{1, 1}));
    }
  }
}

TEST_F(LLMEngineTest, AbortingARequestEndsAllOfItsAnswers) {
  LLMEngine engine = make();
  SamplingParams two = params(7, 50);
  two.n = 2;
  const int64_t id = engine.add_request({1, 2, 3}, two);
  (void)engine.step();
  engine.abort_request(id);
  const RequestOutput output = run(engine).at(id);
  ASSERT_EQ(output.outputs.size(), 2u);
  for (const CompletionOutput& answer : output.outputs)
    EXPECT_EQ(answer.finish_reason, FinishReason::abort);
}

TEST_F(LLMEngineTest, ARefusedRequestIsReportedByTheNextStepAndNeverScheduled) {
  LLMEngine engine = make();
  const int64_t id = engine.add_request({}, {});
  EXPECT_FALSE(engine.is_finished());
  const auto outputs = engine.step();
  ASSERT_EQ(outputs.size(), 1u);
  EXPECT_EQ(outputs[0].request_id, id);
  EXPECT_TRUE(outputs[0].finished);
  EXPECT_EQ(outputs[0].outputs[0].finish_reason, FinishReason::error);
  EXPECT_NE(outputs[0].error.find("empty"), std::string::npos);
  EXPECT_TRUE(engine.is_finished());
  EXPECT_EQ(engine.stats().steps, 0);
}

TEST_F(LLMEngineTest, WhatAFailingStepHadToReportIsGivenBeforeTheFailure) {
  script_->fail_after = 0;
  LLMEngine engine = make();
  engine.add_request({1, 2, 3}, params(1, 10));
  const int64_t refused = engine.add_request({}, {});
  const auto outputs = engine.step();
  ASSERT_EQ(outputs.size(), 1u);
  EXPECT_EQ(outputs[0].request_id, refused);
  EXPECT_EQ(outputs[0].outputs[0].finish_reason, FinishReason::error);
  EXPECT_FALSE(engine.is_finished()) << "the failure has not been told yet";
  EXPECT_THROW(engine.step(), Error);
  EXPECT_TRUE(engine.is_finished());
}

TEST_F(LLMEngineTest, TheEnginesSeedDecidesForRequestsWithoutOne) {
  const auto seeds_with = [&](int64_t seed) {
    config_.seed = static_cast<decltype(config_.seed)>(seed);
    script_->seeds.clear();
    LLMEngine engine = make();
    SamplingParams p = params(0, 1);
    p.seed.reset();
    engine.add_request({1, 2, 3}, p);
    engine.add_request({1, 2, 3}, p);
    run(engine);
    return script_->seeds;
  };
  const auto one = seeds_with(1), two = seeds_with(2);
  ASSERT_EQ(one.size(), 2u);
  EXPECT_NE(one[0], one[1]) << "each request has its own";
  EXPECT_NE(one, two);
  EXPECT_EQ(seeds_with(1), one);
}

TEST_F(LLMEngineTest, EosEndsARequestAfterMinTokensAndNotWhereItIsIgnored) {
  for (const int64_t seed : {1, 2, 3}) script_->tokens[seed][4] = script_->tokens[seed][6] = 99;
  LLMEngine engine = make();
  SamplingParams waits = params(2, 10), ignores = params(3, 10);
  waits.min_tokens = 3;
  ignores.ignore_eos = true;
  engine.add_request({1, 2, 3}, params(1, 10));
  engine.add_request({1, 2, 3}, waits);
  engine.add_request({1, 2, 3}, ignores);
  const auto outputs = run(engine);
  EXPECT_EQ(outputs.at(0).outputs[0].token_ids, (std::vector<int32_t>{1, 99}));
  EXPECT_EQ(outputs.at(0).outputs[0].finish_reason, FinishReason::stop);
  EXPECT_EQ(outputs.at(0).outputs[0].stop_reason, "");
  EXPECT_EQ(outputs.at(1).outputs[0].token_ids, (std::vector<int32_t>{1, 99, 1, 99}));
  EXPECT_EQ(outputs.at(2).outputs[0].token_ids.size(), 10u);
  EXPECT_EQ(outputs.at(2).outputs[0].finish_reason, FinishReason::length);
}

TEST_F(LLMEngineTest, AStopTokenIsNamedEvenIfItIsEosToo) {
  script_->tokens[1][3] = 42;
  script_->tokens[2][3] = 99;
  LLMEngine engine = make();
  SamplingParams p = params(1, 10);
  p.stop_token_ids = {42, 99};
  engine.add_request({1, 2, 3}, p);
  p.seed = 2;
  engine.add_request({1, 2, 3}, p);
  const auto outputs = run(engine);
  EXPECT_EQ(outputs.at(0).outputs[0].stop_reason, "42");
  EXPECT_EQ(outputs.at(1).outputs[0].stop_reason, "99");
}

TEST_F(LLMEngineTest, AnAnswerEndsWithMaxModelLen) {
  config_.max_model_len = 16;
  LLMEngine engine = make();
  engine.add_request({1, 2, 3}, params(1, INT64_MAX));
  engine.add_request(std::vector<int32_t>(15, 1), params(1, 100));
  engine.add_request(std::vector<int32_t>(16, 1), params(1, 1));
  const auto outputs = run(engine);
  EXPECT_EQ(outputs.at(0).outputs[0].token_ids.size(), 13u);
  EXPECT_EQ(outputs.at(0).outputs[0].finish_reason, FinishReason::length);
  EXPECT_EQ(outputs.at(1).outputs[0].token_ids.size(), 1u);
  EXPECT_EQ(outputs.at(2).outputs[0].finish_reason, FinishReason::error);
  for (const char* part : {"16", "15", "max_model_len"})
    EXPECT_NE(outputs.at(2).error.find(part), std::string::npos) << outputs.at(2).error;
}

/// The table of an Error(device) and its one-line head.
void expect_too_much(const std::function<void()>& body, const std::vector<std::string>& named) {
  try {
    body();
    ADD_FAILURE() << named.front();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::device);
    for (const std::string& fragment : named)
      EXPECT_NE(std::string(error.what()).find(fragment), std::string::npos)
          << fragment << ": " << error.what();
  }
}

TEST_F(LLMEngineTest, MemoryThatIsNotThereGivesATableAndWaysOut) {
  const std::vector<std::string> table = {"not enough memory on script",
                                          "weights",
                                          "workspace",
                                          "KV cache",
                                          "needed, at least",
                                          "available",
                                          "ways out"};
  config_.num_gpu_blocks_override = 3'000'000;  // 512 bytes each
  expect_too_much([&] { make(); }, table);
  config_.num_gpu_blocks_override = 0;
  config_.cpu_kvcache_bytes = INT64_MAX;
  expect_too_much([&] { make(); }, table);
  config_.cpu_kvcache_bytes = 0;
  config_.max_model_len = model_.max_position_embeddings = int64_t{1} << 24;
  expect_too_much([&] { make(); }, table);
  // The tables of blocks that a step may need are more than there is: no model is small enough.
  config_.max_model_len = model_.max_position_embeddings = int64_t{1} << 30;
  expect_too_much([&] { make(); }, {"ways out: a smaller --max-model-len or --max-num-seqs; "});
}

TEST_F(LLMEngineTest, WhicheverAllocationFailsNothingIsLeftBehind) {
  int succeed = 0;
  for (bool made = false; !made; ++succeed) {
    script_->allocations = succeed;
    try {
      make();
      made = true;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::device) << succeed;
    }
    EXPECT_EQ(script_->live, 0) << succeed;
  }
  EXPECT_GT(succeed, 8)
      << "weights, cache, workspace, input and output, and the slots of two steps";
}

TEST_F(LLMEngineTest, WhicheverStepFailsNothingIsLeftBehind) {
  for (int succeed = 0; succeed < 12; ++succeed) {
    script_->fail_after = succeed;
    {
      LLMEngine engine = make();
      for (int i = 0; i < 6; ++i) engine.add_request({1, 2, 3}, params(i, 4));
      engine.abort_request(succeed % 6);
      EXPECT_THROW(run(engine), Error) << succeed;
      EXPECT_TRUE(engine.is_finished());
    }
    EXPECT_EQ(script_->live, 0) << succeed;
  }
}

TEST_F(LLMEngineTest, AKvCacheTooSmallForWhatWasAskedIsAWrongOption) {
  const auto message = [&]() -> std::string {
    try {
      make();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
      return error.what();
    }
    return "";
  };
  // 512 of keys and values, and 4 for each token's id.
  config_.cpu_kvcache_bytes = 543;
  EXPECT_EQ(message(), "cpu_kvcache_bytes is 543: one block of 8 tokens has 544 bytes");
  config_.cpu_kvcache_bytes = 1088;
  config_.max_model_len = 24;
  EXPECT_EQ(message(), "cpu_kvcache_bytes is 1088: one sequence of max_model_len 24 needs 1632");
  for (const int64_t open : {0, -1}) {  // nobody asked for a length: it bends
    config_.max_model_len = open;
    EXPECT_EQ(make().memory().limits.max_model_len, 16);
  }
}

// As vLLM's "auto": where the default is at most 4096.
TEST_F(LLMEngineTest, TheWholeContextOfAModelMayBeAskedFor) {
  model_.max_position_embeddings = 5000;
  EXPECT_EQ(make().memory().limits.max_model_len, 4096);
  config_.max_model_len = -1;
  EXPECT_EQ(make().memory().limits.max_model_len, 5000);
  config_.num_gpu_blocks_override = 600;
  EXPECT_EQ(make().memory().limits.max_model_len, 4800);
}

TEST_F(LLMEngineTest, ARequestThatTheWholeCacheCannotHoldIsRefusedWithTheNumbers) {
  config_.num_gpu_blocks_override = 2;
  EXPECT_EQ(make().memory().limits.max_model_len, 16);  // the default bends
  config_.max_model_len = 64;
  LLMEngine engine = make();
  engine.add_request({1, 2, 3}, params(1, 14));  // 16 positions: the last token's are not stored
  engine.add_request({1, 2, 3}, params(1, 15));
  const auto outputs = run(engine);
  EXPECT_EQ(outputs.at(0).outputs[0].token_ids.size(), 14u);
  EXPECT_EQ(outputs.at(1).outputs[0].finish_reason, FinishReason::error);
  for (const char* part : {"3 KV blocks", "max_tokens 15", "has 2"})
    EXPECT_NE(outputs.at(1).error.find(part), std::string::npos) << outputs.at(1).error;
}

}  // namespace
}  // namespace nanovllm
