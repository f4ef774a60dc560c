#include "engine/scheduler/scheduler.h"

#include <limits>

#include <gtest/gtest.h>

#include "nanovllm/error.h"

#include "unit/engine/scheduler/scheduler_rig.h"

namespace nanovllm {
namespace {

// -- Admission.

TEST(Scheduler, RefusesWhatCouldNeverRun) {
  auto config = small_config(/*num_blocks=*/4, /*block_size=*/4);
  config.max_model_len = 30;
  const Scheduler scheduler(config);
  EXPECT_EQ(scheduler.refusal(1, 1), std::nullopt);
  EXPECT_EQ(scheduler.refusal(16, 1), std::nullopt);  // the last token is never stored
  EXPECT_EQ(scheduler.refusal(10, 7), std::nullopt);
  EXPECT_NE(scheduler.refusal(10, 8), std::nullopt);  // 17 positions, the cache has 16
  EXPECT_NE(scheduler.refusal(17, 1), std::nullopt);
  EXPECT_NE(scheduler.refusal(0, 1), std::nullopt);
  EXPECT_NE(scheduler.refusal(1, 0), std::nullopt);
  EXPECT_NE(scheduler.refusal(30, 1), std::nullopt);
  EXPECT_NE(scheduler.refusal(1, std::numeric_limits<int64_t>::max()), std::nullopt);
  EXPECT_NE(scheduler.refusal(std::numeric_limits<int64_t>::max(), 1), std::nullopt);
}

TEST(Scheduler, RefusalNamesTheNumbersAndTheRemedy) {
  auto config = small_config(4, 4);
  config.max_model_len = 30;
  const Scheduler scheduler(config);
  EXPECT_EQ(
      *scheduler.refusal(12, 8),
      "prompt (12 tokens) and max_tokens 8 need 5 KV blocks of 4 tokens, the whole cache has 4: "
      "lower max_tokens, shorten the prompt or enlarge the cache");
}

TEST(Scheduler, AddThrowsOnAnInfeasibleOrRepeatedRequestAndLivesOn) {
  OwningScheduler scheduler(small_config());
  Sequence& queued = add(scheduler, 1, count_up(4));
  EXPECT_THROW(scheduler.Scheduler::add(queued), Error);
  EXPECT_THROW(add(scheduler, 2, {}), Error);            // nano-vLLM: IndexError in the step
  EXPECT_THROW(add(scheduler, 3, count_up(65)), Error);  // nano-vLLM: AssertionError in the step
  EXPECT_EQ(shares(step(scheduler)), (Shares{{1, 0, 4}}));
  EXPECT_EQ(scheduler.stats().waiting, 0);
}

TEST(Scheduler, AdmitsInOrderOfArrivalUpToMaxNumSeqs) {
  auto config = small_config();
  config.max_num_seqs = 2;
  OwningScheduler scheduler(config);
  for (int id = 1; id <= 3; ++id) add(scheduler, id, count_up(2, 10 * id), /*max_tokens=*/2);
  EXPECT_EQ(shares(step(scheduler)), (Shares{{1, 0, 2}, {2, 0, 2}}));
  EXPECT_EQ(shares(step(scheduler)), (Shares{{1, 2, 1}, {2, 2, 1}}));  // both end by length
  EXPECT_EQ(shares(step(scheduler)), (Shares{{3, 0, 2}}));
}

TEST(Scheduler, DoesNotLetAShortPromptOvertakeALongOneThatWaitsForBlocks) {
  OwningScheduler scheduler(small_config(/*num_blocks=*/4));
  add(scheduler, 1, count_up(8), 4);
  step(scheduler);
  add(scheduler, 2, count_up(12, 50), 4);
  add(scheduler, 3, count_up(1, 90), 4);
  EXPECT_EQ(shares(step(scheduler)), (Shares{{1, 8, 1}}));
}

TEST(Scheduler, LeavesABlockPerRunningSequenceWhenItAdmits) {
  OwningScheduler scheduler(small_config(/*num_blocks=*/4));
  add(scheduler, 1, count_up(2));
  step(scheduler);  // one block in use, three idle
  add(scheduler, 2, count_up(12, 50), 2);
  EXPECT_EQ(shares(step(scheduler)), (Shares{{1, 2, 1}}));  // 2 would take all three
  scheduler.finish(1, FinishReason::abort);
  EXPECT_EQ(shares(step(scheduler)), (Shares{{2, 0, 12}}));
}

TEST(Scheduler, AdmitsWhoWaitedForBlocksAsSoonAsThereAreEnoughThoughOthersRun) {
  OwningScheduler scheduler(small_config(/*num_blocks=*/6));
  add(scheduler, 1, count_up(1));
  add(scheduler, 2, count_up(9, 20));
  step(scheduler);  // four blocks in use
  add(scheduler, 3, count_up(5, 50));
  EXPECT_EQ(step(scheduler).sequences.size(), 2u);
  scheduler.finish(2, FinishReason::abort);
  EXPECT_EQ(shares(step(scheduler)), (Shares{{1, 2, 1}, {3, 0, 5}}));
}

// -- One budget, chunks, mixed steps.

TEST(Scheduler, SharesOneBudgetBetweenDecodesAndChunksOfPrompts) {
  auto config = small_config();
  config.max_num_batched_tokens = 6;
  OwningScheduler scheduler(config);
  add(scheduler, 1, count_up(4));
  add(scheduler, 2, count_up(9, 50));
  const Plan first = step(scheduler);
  EXPECT_EQ(shares(first), (Shares{{1, 0, 4}, {2, 0, 2}}));
  EXPECT_TRUE(first.sequences[0].samples);
  EXPECT_FALSE(first.sequences[1].samples);
  EXPECT_EQ(first.num_tokens, 6);
  EXPECT_EQ(first.num_prefill_tokens, 6);
  const Plan second = step(scheduler);
  EXPECT_EQ(shares(second), (Shares{{1, 4, 1}, {2, 2, 5}}));
  EXPECT_FALSE(second.sequences[1].samples);
  EXPECT_EQ(second.num_prefill_tokens, 5);
  const Plan third = step(scheduler);
  EXPECT_EQ(shares(third), (Shares{{1, 5, 1}, {2, 7, 2}}));
  EXPECT_TRUE(third.sequences[1].samples);
  EXPECT_EQ(shares(step(scheduler)), (Shares{{1, 6, 1}, {2, 9, 1}}));
}

TEST(Scheduler, PlansTheNextChunkOfAPromptWhileTheLastIsInFlight) {
  auto config = small_config();
  config.max_num_batched_tokens = 4;
  OwningScheduler scheduler(config);
  add(scheduler, 1, count_up(6));
  const Plan first = scheduler.schedule();
  const Plan second = scheduler.schedule();
  EXPECT_EQ(shares(second), (Shares{{1, 4, 2}}));
  EXPECT_FALSE(second.sequences[0].input_on_device);
  EXPECT_TRUE(second.sequences[0].samples);
  process(scheduler, first);
  process(scheduler, second);
  EXPECT_EQ(scheduler.find(1)->num_generated(), 1);
}

// -- Ends.

TEST(Scheduler, EndsAtMaxTokens) {
  OwningScheduler scheduler(small_config());
  add(scheduler, 1, {1, 2}, /*max_tokens=*/3);
  for (int i = 0; i < 3; ++i) step(scheduler, 40 + i);
  EXPECT_TRUE(step(scheduler).empty());
  const auto finished = scheduler.take_finished();
  ASSERT_EQ(finished.size(), 1u);
  EXPECT_EQ(finished[0]->token_ids, (Tokens{1, 2, 40, 41, 42}));
  EXPECT_EQ(finished[0]->finish_reason, FinishReason::length);
  EXPECT_EQ(finished[0]->stop_reason, "");
  EXPECT_TRUE(scheduler.take_finished().empty());
  EXPECT_EQ(scheduler.find(1), nullptr);
}

TEST(Scheduler, EndsAtEosWithoutAndAtAStopTokenWithAStopReason) {
  OwningScheduler scheduler(small_config());
  for (int id : {1, 2}) {
    auto sequence = make_sequence(id, {1, 2});
    sequence->stop_token_ids = {77, 78};  // 78 is EOS
    sequence->params.stop_token_ids = {77};
    scheduler.add(std::move(sequence));
  }
  Plan plan = scheduler.schedule();
  scheduler.process(plan, Tokens{77, 78});
  const auto finished = scheduler.take_finished();
  ASSERT_EQ(finished.size(), 2u);
  EXPECT_EQ(finished[0]->finish_reason, FinishReason::stop);
  EXPECT_EQ(finished[0]->stop_reason, "77");
  EXPECT_EQ(finished[1]->finish_reason, FinishReason::stop);
  EXPECT_EQ(finished[1]->stop_reason, "");
  EXPECT_EQ(finished[1]->token_ids.back(), 78);  // kept, the text leaves it out
}

TEST(Scheduler, DoesNotStopBeforeMinTokens) {
  OwningScheduler scheduler(small_config());
  auto sequence = make_sequence(1, {1, 2});
  sequence->stop_token_ids = {77};
  sequence->params.min_tokens = 2;
  scheduler.add(std::move(sequence));
  step(scheduler, 77);
  EXPECT_TRUE(scheduler.has_unfinished());
  step(scheduler, 77);
  EXPECT_FALSE(scheduler.has_unfinished());
}

TEST(Scheduler, FinishIsIdempotentAndIgnoresUnknownIds) {
  OwningScheduler scheduler(small_config());
  add(scheduler, 1, {1});
  add(scheduler, 2, {2});
  step(scheduler);
  add(scheduler, 3, {3});  // waiting
  EXPECT_FALSE(scheduler.finish(99, FinishReason::abort));
  EXPECT_TRUE(scheduler.finish(1, FinishReason::stop, "END"));
  EXPECT_FALSE(scheduler.finish(1, FinishReason::abort));
  EXPECT_TRUE(scheduler.finish(2, FinishReason::error, "why"));
  EXPECT_TRUE(scheduler.finish(3, FinishReason::abort));
  Integrity::verify(scheduler);
  const auto finished = scheduler.take_finished();
  ASSERT_EQ(finished.size(), 3u);
  EXPECT_EQ(finished[0]->finish_reason, FinishReason::stop);
  EXPECT_EQ(finished[0]->stop_reason, "END");
  EXPECT_EQ(finished[1]->error, "why");
  EXPECT_EQ(finished[2]->finish_reason, FinishReason::abort);
  EXPECT_FALSE(scheduler.finish(1, FinishReason::abort));
  EXPECT_EQ(scheduler.blocks().num_idle(), 16);
}

TEST(Scheduler, LogitsThatAreNotFiniteFailThatSequenceAloneAndLeaveNothingInTheCache) {
  OwningScheduler scheduler(small_config());
  add(scheduler, 1, count_up(9));
  add(scheduler, 2, count_up(9, 50));
  Plan plan = scheduler.schedule();
  EXPECT_EQ(scheduler.blocks().num_cached(), 4);
  scheduler.process(plan, Tokens{-1, 5});
  Integrity::verify(scheduler);
  EXPECT_EQ(scheduler.blocks().num_cached(), 2);
  const auto finished = scheduler.take_finished();
  ASSERT_EQ(finished.size(), 1u);
  EXPECT_EQ(finished[0]->finish_reason, FinishReason::error);
  EXPECT_EQ(finished[0]->error, "the model's logits were not finite");
  EXPECT_EQ(scheduler.find(2)->num_generated(), 1);
}

TEST(Scheduler, RefusesPlansOutOfOrderAndResultsOfTheWrongSize) {
  OwningScheduler scheduler(small_config());
  add(scheduler, 1, {1, 2});
  Plan first = scheduler.schedule(), second = scheduler.schedule(), empty;
  EXPECT_THROW(scheduler.process(second, Tokens{1}), Error);
  EXPECT_THROW(scheduler.process(first, Tokens{}), Error);
  EXPECT_THROW(scheduler.process(empty, Tokens{}), Error);
  process(scheduler, first);
  EXPECT_THROW(scheduler.process(first, Tokens{1}), Error);
  process(scheduler, second);
}

// -- What nano-vLLM's users ran into.

TEST(Scheduler, ACacheExhaustedWhileDecodingPreemptsInsteadOfFailing) {  // nano-vLLM #274
  for (const int depth : {1, 2}) {
    for (const bool caching : {false, true}) {
      auto config = small_config(/*num_blocks=*/6, /*block_size=*/2);
      config.max_plans_in_flight = depth;
      config.enable_prefix_caching = caching;
      OwningScheduler scheduler(config);
      FakeRunner runner(config.num_blocks, config.block_size, 50);
      std::map<int64_t, Tokens> expected;
      for (int id = 1; id <= 8; ++id) {
        const Sequence& s = add(scheduler, id, count_up(1 + id % 3, 10 * id), 9);
        expected[id] = expected_output(s, 50);
      }
      expect_plain_outputs(scheduler, runner, depth, expected);
      EXPECT_GT(scheduler.stats().preemptions, 0);
    }
  }
}

// nano-vLLM's issues 211 and 233.
TEST(Scheduler, PreemptionWithPrefixHitsUnder512RequestsGivesPlainOutputs) {
  for (const int depth : {1, 2}) {
    auto config = small_config(/*num_blocks=*/40, /*block_size=*/4);
    config.max_plans_in_flight = depth;
    config.max_num_seqs = 64;
    OwningScheduler scheduler(config);
    FakeRunner runner(config.num_blocks, config.block_size, 30);
    std::map<int64_t, Tokens> expected;
    for (int id = 1; id <= 512; ++id) {
      Tokens prompt = count_up(4 * (id % 4), 1);  // prefixes of one another
      prompt.push_back(id % 7);
      const Sequence& s = add(scheduler, id, prompt, 1 + id % 40);
      expected[id] = expected_output(s, 30);
    }
    expect_plain_outputs(scheduler, runner, depth, expected);
    EXPECT_GT(scheduler.stats().preemptions, 0);
    EXPECT_GT(scheduler.stats().cached_prompt_tokens, 0);
  }
}

TEST(Scheduler, ARequestMayFillMaxModelLenAndTheWholeCacheExactly) {  // nano-vLLM #190, #258
  for (const int depth : {1, 2}) {
    auto config = small_config(/*num_blocks=*/4, /*block_size=*/4);
    config.max_model_len = 17;  // 16 positions are stored
    config.max_plans_in_flight = depth;
    for (const int prompt_size : {1, 8, 15, 16}) {
      OwningScheduler scheduler(config);
      FakeRunner runner(config.num_blocks, config.block_size, 50);
      ASSERT_EQ(scheduler.refusal(prompt_size, 17 - prompt_size), std::nullopt);
      const Sequence& s = add(scheduler, 1, count_up(prompt_size), 17 - prompt_size);
      expect_plain_outputs(scheduler, runner, depth, {{1, expected_output(s, 50)}});
      EXPECT_EQ(scheduler.stats().preemptions, 0);
    }
  }
}

TEST(Scheduler, ATableCoversExactlyTheComputedTokensAtEveryBlockBoundary) {  // nano-vLLM #30, #150
  OwningScheduler scheduler(small_config(/*num_blocks=*/16, /*block_size=*/2));
  const Sequence& s = add(scheduler, 1, {1}, 20);
  for (int64_t computed = 1; computed <= 20; ++computed) {
    const Plan plan = scheduler.schedule();
    EXPECT_EQ(s.num_computed_tokens, computed);
    EXPECT_EQ(std::ssize(s.block_table), (computed + 1) / 2);
    EXPECT_EQ(s.num_tokens(), computed);
    EXPECT_EQ(s.num_in_flight, 1);
    process(scheduler, plan);
  }
  EXPECT_FALSE(scheduler.has_unfinished());
}

TEST(Scheduler, NoStaleEntrySurvivesTheReuseOfItsBlock) {  // nano-vLLM #163
  OwningScheduler scheduler(small_config(/*num_blocks=*/3, /*block_size=*/2));
  add(scheduler, 1, {1, 2, 3, 4, 5}, 1);
  step(scheduler);
  add(scheduler, 2, {6, 7, 8, 9, 10}, 1);  // takes all three blocks
  step(scheduler);
  const Sequence& s = add(scheduler, 3, {1, 2, 3, 4, 5}, 1);
  step(scheduler);
  EXPECT_EQ(s.num_cached_tokens, 0);
}

// MinivLLM unpacks three values of a step that returned two.
TEST(Scheduler, AnEmptyPlanIsNotInFlight) {
  OwningScheduler scheduler(small_config());
  const Plan plan = scheduler.schedule();
  EXPECT_TRUE(plan.empty());
  EXPECT_EQ(plan.step, 0);
  EXPECT_EQ(scheduler.plans_in_flight(), 0);
  add(scheduler, 1, {1});
  EXPECT_EQ(scheduler.schedule().step, 1);
}

}  // namespace
}  // namespace nanovllm
