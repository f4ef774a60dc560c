#include "engine/scheduler.h"

#include <deque>
#include <limits>
#include <map>
#include <numeric>

#include <gtest/gtest.h>

#include "nanovllm/error.h"

#include "unit/fake_runner.h"

namespace nanovllm {
namespace {

using Tokens = std::vector<int32_t>;

SchedulerConfig small_config(int64_t num_blocks = 16, int block_size = 4) {
  SchedulerConfig config;
  config.num_blocks = num_blocks;
  config.block_size = block_size;
  config.max_model_len = 1000;
  config.max_num_seqs = 8;
  config.max_num_batched_tokens = 64;
  return config;
}

/// `count` tokens from `first` on.
Tokens count_up(int count, int32_t first = 100) {
  Tokens tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

std::unique_ptr<Sequence> make_sequence(int64_t id, Tokens prompt, int64_t max_tokens = 8) {
  auto sequence = std::make_unique<Sequence>();
  sequence->request_id = id;
  sequence->token_ids = std::move(prompt);
  sequence->num_prompt_tokens = sequence->num_tokens();
  sequence->max_tokens = max_tokens;
  return sequence;
}

Sequence& add(Scheduler& scheduler, int64_t id, Tokens prompt, int64_t max_tokens = 8) {
  return scheduler.add(make_sequence(id, std::move(prompt), max_tokens));
}

/// Processes a plan, every sampling sequence getting `token`.
void process(Scheduler& scheduler, const Plan& plan, int32_t token = 1) {
  const auto samples = std::ranges::count(plan.sequences, true, &ScheduledSequence::samples);
  scheduler.process(plan, Tokens(static_cast<size_t>(samples), token));
  scheduler.check_integrity();
}

Plan step(Scheduler& scheduler, int32_t token = 1) {
  Plan plan = scheduler.schedule();
  scheduler.check_integrity();
  if (!plan.empty()) process(scheduler, plan, token);
  return plan;
}

/// Steps until nothing is left to do.
void run_to_end(Scheduler& scheduler) {
  for (int steps = 0; scheduler.has_unfinished(); ++steps) {
    ASSERT_LT(steps, 1000);
    step(scheduler);
  }
}

/// (request id, first position, number of tokens) of all entries.
using Shares = std::vector<std::tuple<int64_t, int64_t, int64_t>>;
Shares shares(const Plan& plan) {
  Shares shares;
  for (const auto& entry : plan.sequences) {
    shares.emplace_back(entry.sequence->request_id, entry.start, entry.num_tokens);
  }
  return shares;
}

/// Runs everything to its end with the FakeRunner, `depth` steps in flight, and expects the tokens
/// of the plain histories.
void expect_plain_outputs(Scheduler& scheduler, FakeRunner& runner, int64_t depth,
                          std::map<int64_t, Tokens> expected) {
  std::deque<Plan> plans;
  for (int steps = 0; scheduler.has_unfinished() || !plans.empty(); ++steps) {
    ASSERT_LT(steps, 10000);
    Plan plan = scheduler.schedule();
    scheduler.check_integrity();
    const bool planned = !plan.empty();
    if (planned) {
      runner.launch(plan);
      plans.push_back(std::move(plan));
    }
    if (!plans.empty() && (!planned || std::ssize(plans) == depth)) {
      scheduler.process(plans.front(), runner.run());
      plans.pop_front();
    }
    for (const auto& s : scheduler.take_finished()) {
      Tokens output(s->token_ids.begin() + s->num_prompt_tokens, s->token_ids.end());
      EXPECT_EQ(output, expected.at(s->request_id)) << "request " << s->request_id;
      EXPECT_EQ(s->error, "");
      expected.erase(s->request_id);
    }
  }
  EXPECT_TRUE(expected.empty()) << expected.size() << " requests never ended";
  EXPECT_EQ(scheduler.blocks().num_idle(), scheduler.blocks().num_blocks());
}

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
  Scheduler scheduler(small_config());
  add(scheduler, 1, count_up(4));
  EXPECT_THROW(add(scheduler, 1, count_up(4)), Error);
  EXPECT_THROW(add(scheduler, 2, {}), Error);            // nano-vLLM: IndexError in the step
  EXPECT_THROW(add(scheduler, 3, count_up(65)), Error);  // nano-vLLM: AssertionError in the step
  EXPECT_EQ(shares(step(scheduler)), (Shares{{1, 0, 4}}));
  EXPECT_EQ(scheduler.stats().waiting, 0);
}

TEST(Scheduler, AdmitsInOrderOfArrivalUpToMaxNumSeqs) {
  auto config = small_config();
  config.max_num_seqs = 2;
  Scheduler scheduler(config);
  for (int id = 1; id <= 3; ++id) add(scheduler, id, count_up(2, 10 * id), /*max_tokens=*/2);
  EXPECT_EQ(shares(step(scheduler)), (Shares{{1, 0, 2}, {2, 0, 2}}));
  EXPECT_EQ(shares(step(scheduler)), (Shares{{1, 2, 1}, {2, 2, 1}}));  // both end by length
  EXPECT_EQ(shares(step(scheduler)), (Shares{{3, 0, 2}}));
}

TEST(Scheduler, DoesNotLetAShortPromptOvertakeALongOneThatWaitsForBlocks) {
  Scheduler scheduler(small_config(/*num_blocks=*/4));
  add(scheduler, 1, count_up(8), 4);
  step(scheduler);
  add(scheduler, 2, count_up(12, 50), 4);
  add(scheduler, 3, count_up(1, 90), 4);
  EXPECT_EQ(shares(step(scheduler)), (Shares{{1, 8, 1}}));
}

TEST(Scheduler, LeavesABlockPerRunningSequenceWhenItAdmits) {
  Scheduler scheduler(small_config(/*num_blocks=*/4));
  add(scheduler, 1, count_up(2));
  step(scheduler);  // one block in use, three idle
  add(scheduler, 2, count_up(12, 50), 2);
  EXPECT_EQ(shares(step(scheduler)), (Shares{{1, 2, 1}}));  // 2 would take all three
  scheduler.finish(1, FinishReason::abort);
  EXPECT_EQ(shares(step(scheduler)), (Shares{{2, 0, 12}}));
}

TEST(Scheduler, AdmitsWhoWaitedForBlocksAsSoonAsThereAreEnoughThoughOthersRun) {
  Scheduler scheduler(small_config(/*num_blocks=*/6));
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
  Scheduler scheduler(config);
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
  Scheduler scheduler(config);
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
  Scheduler scheduler(small_config());
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
  Scheduler scheduler(small_config());
  for (int id : {1, 2}) {
    auto sequence = make_sequence(id, {1, 2});
    sequence->stop_token_ids = {77, 78};  // 78 is EOS
    sequence->params.stop_token_ids = {77};
    scheduler.add(std::move(sequence));
  }
  const Plan plan = scheduler.schedule();
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
  Scheduler scheduler(small_config());
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
  Scheduler scheduler(small_config());
  add(scheduler, 1, {1});
  add(scheduler, 2, {2});
  step(scheduler);
  add(scheduler, 3, {3});  // waiting
  EXPECT_FALSE(scheduler.finish(99, FinishReason::abort));
  EXPECT_TRUE(scheduler.finish(1, FinishReason::stop, "END"));
  EXPECT_FALSE(scheduler.finish(1, FinishReason::abort));
  EXPECT_TRUE(scheduler.finish(2, FinishReason::error, "why"));
  EXPECT_TRUE(scheduler.finish(3, FinishReason::abort));
  scheduler.check_integrity();
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
  Scheduler scheduler(small_config());
  add(scheduler, 1, count_up(9));
  add(scheduler, 2, count_up(9, 50));
  const Plan plan = scheduler.schedule();
  EXPECT_EQ(scheduler.blocks().num_cached(), 4);
  scheduler.process(plan, Tokens{-1, 5});
  scheduler.check_integrity();
  EXPECT_EQ(scheduler.blocks().num_cached(), 2);
  const auto finished = scheduler.take_finished();
  ASSERT_EQ(finished.size(), 1u);
  EXPECT_EQ(finished[0]->finish_reason, FinishReason::error);
  EXPECT_EQ(finished[0]->error, "the model's logits were not finite");
  EXPECT_EQ(scheduler.find(2)->num_generated(), 1);
}

TEST(Scheduler, RefusesPlansOutOfOrderAndResultsOfTheWrongSize) {
  Scheduler scheduler(small_config());
  add(scheduler, 1, {1, 2});
  const Plan first = scheduler.schedule();
  const Plan second = scheduler.schedule();
  EXPECT_THROW(scheduler.process(second, Tokens{1}), Error);
  EXPECT_THROW(scheduler.process(first, Tokens{}), Error);
  EXPECT_THROW(scheduler.process(Plan{}, Tokens{}), Error);
  process(scheduler, first);
  EXPECT_THROW(scheduler.process(first, Tokens{1}), Error);
  process(scheduler, second);
}

// -- Steps in flight.

TEST(Scheduler, PlansTheNextStepBeforeTheTokenIsKnown) {
  Scheduler scheduler(small_config());
  const Sequence& s = add(scheduler, 1, {1, 2});
  const Plan first = scheduler.schedule();
  EXPECT_EQ(s.num_in_flight, 1);
  const Plan second = scheduler.schedule();
  EXPECT_EQ(shares(second), (Shares{{1, 2, 1}}));
  EXPECT_TRUE(second.sequences[0].input_on_device);
  EXPECT_TRUE(scheduler.schedule().empty());  // two plans are in flight
  process(scheduler, first, 30);
  const Plan third = scheduler.schedule();
  EXPECT_TRUE(third.sequences[0].input_on_device);
  process(scheduler, second, 31);
  process(scheduler, third, 32);
  EXPECT_EQ(s.token_ids, (Tokens{1, 2, 30, 31, 32}));
  const Plan fourth = scheduler.schedule();
  EXPECT_FALSE(fourth.sequences[0].input_on_device);
}

TEST(Scheduler, NeverPlansPastMaxTokens) {
  Scheduler scheduler(small_config());
  add(scheduler, 1, {1, 2}, /*max_tokens=*/2);
  const Plan first = scheduler.schedule();
  const Plan second = scheduler.schedule();
  process(scheduler, first);
  EXPECT_TRUE(scheduler.schedule().empty());
  EXPECT_TRUE(scheduler.has_unfinished());
  process(scheduler, second);
  EXPECT_FALSE(scheduler.has_unfinished());
}

TEST(Scheduler, AStopFoundLateCostsOneRowWhoseResultIsDropped) {
  Scheduler scheduler(small_config());
  auto sequence = make_sequence(1, {1, 2});
  sequence->stop_token_ids = {77};
  scheduler.add(std::move(sequence));
  const Plan first = scheduler.schedule();
  const Plan second = scheduler.schedule();
  process(scheduler, first, 77);
  EXPECT_FALSE(scheduler.has_unfinished());
  EXPECT_TRUE(scheduler.take_finished().empty());  // the second plan still refers to it
  EXPECT_EQ(scheduler.blocks().num_idle(), 15);
  process(scheduler, second, 5);
  EXPECT_EQ(scheduler.blocks().num_idle(), 16);
  const auto finished = scheduler.take_finished();
  ASSERT_EQ(finished.size(), 1u);
  EXPECT_EQ(finished[0]->token_ids, (Tokens{1, 2, 77}));
}

TEST(Scheduler, BlocksFreedInFlightReturnWhenThePlanIsProcessed) {
  Scheduler scheduler(small_config(/*num_blocks=*/4));
  add(scheduler, 1, count_up(12), 4);
  const Plan first = scheduler.schedule();
  scheduler.finish(1, FinishReason::abort);
  EXPECT_EQ(scheduler.blocks().num_idle(), 1);
  add(scheduler, 2, count_up(12, 50), 4);
  EXPECT_TRUE(scheduler.schedule().empty());  // there is work, but its blocks are on their way back
  process(scheduler, first);
  EXPECT_EQ(scheduler.blocks().num_idle(), 4);
  EXPECT_EQ(shares(step(scheduler)), (Shares{{2, 0, 12}}));
}

// -- Preemption.

TEST(Scheduler, PreemptsTheNewestAndResumesItWithItsTokens) {
  auto config = small_config(/*num_blocks=*/5);
  config.enable_prefix_caching = false;
  Scheduler scheduler(config);
  add(scheduler, 1, count_up(4), 8);
  const Sequence& second = add(scheduler, 2, count_up(4, 50), 8);
  step(scheduler, 30);
  for (int i = 0; i < 4; ++i) step(scheduler, 31 + i);  // 1 and 2 have two blocks each, full
  EXPECT_EQ(shares(step(scheduler, 35)), (Shares{{1, 8, 1}}));  // 1 takes the last block
  EXPECT_EQ(second.status, SequenceStatus::waiting);
  EXPECT_EQ(second.num_preemptions, 1);
  EXPECT_EQ(scheduler.stats().preemptions, 1);
  EXPECT_EQ(shares(step(scheduler, 36)), (Shares{{1, 9, 1}}));
  EXPECT_EQ(shares(step(scheduler, 37)), (Shares{{1, 10, 1}}));  // and ends
  const Plan resumed = step(scheduler, 35);
  EXPECT_EQ(shares(resumed), (Shares{{2, 0, 9}}));  // prompt and tokens, as one prompt
  EXPECT_TRUE(resumed.sequences[0].samples);
  EXPECT_EQ(second.num_generated(), 6);
}

TEST(Scheduler, APreemptedSequenceWaitsBeforeThoseThatArrivedLater) {
  auto config = small_config(/*num_blocks=*/3, /*block_size=*/4);
  Scheduler scheduler(config);
  add(scheduler, 1, count_up(3), 8);
  add(scheduler, 2, count_up(3, 50), 8);
  step(scheduler);
  add(scheduler, 3, {7}, 8);
  for (int i = 0; i < 20 && scheduler.find(2)->num_preemptions == 0; ++i) step(scheduler);
  ASSERT_EQ(scheduler.find(2)->num_preemptions, 1);
  scheduler.finish(1, FinishReason::abort);
  const Plan plan = step(scheduler);
  ASSERT_FALSE(plan.empty());
  EXPECT_EQ(plan.sequences[0].sequence->request_id, 2);
}

TEST(Scheduler, DropsTheResultOfAPlanFromBeforeThePreemption) {
  Scheduler scheduler(small_config(/*num_blocks=*/3, /*block_size=*/2));
  add(scheduler, 1, {1, 2}, 4);
  const Sequence& newest = add(scheduler, 2, {5}, 4);
  const Plan first = scheduler.schedule();
  const Plan second = scheduler.schedule();  // request 1 takes the third block
  ASSERT_EQ(shares(second), (Shares{{1, 2, 1}, {2, 1, 1}}));
  process(scheduler, first, 30);
  const Plan third = scheduler.schedule();  // request 2 needs one too, and has to go
  EXPECT_EQ(shares(third), (Shares{{1, 3, 1}}));
  EXPECT_EQ(newest.num_preemptions, 1);
  EXPECT_EQ(scheduler.blocks().num_idle(), 0);  // the second plan still writes its block
  process(scheduler, second, 31);
  EXPECT_EQ(newest.token_ids, (Tokens{5, 30}));
  EXPECT_EQ(scheduler.blocks().num_idle(), 1);
  process(scheduler, third, 32);
}

TEST(Scheduler, PreemptsNobodyWhileBlocksAreOnTheirWayBack) {
  auto config = small_config(/*num_blocks=*/5, /*block_size=*/4);
  config.enable_prefix_caching = false;
  Scheduler scheduler(config);
  add(scheduler, 1, count_up(4), 8);
  add(scheduler, 2, count_up(4, 50), 8);
  add(scheduler, 3, count_up(1, 90), 8);
  process(scheduler, scheduler.schedule());
  ASSERT_EQ(scheduler.stats().running, 3);
  process(scheduler, scheduler.schedule());  // five blocks in use
  const Plan in_flight = scheduler.schedule();
  scheduler.finish(3, FinishReason::abort);
  EXPECT_EQ(scheduler.blocks().num_idle(), 0);
  const Plan next = scheduler.schedule();
  EXPECT_EQ(next.sequences.size(), 2u);
  EXPECT_EQ(scheduler.stats().preemptions, 0);
  process(scheduler, in_flight);
  process(scheduler, next);
}

// -- Prefix cache.

TEST(Scheduler, TakesAKnownPrefixFromTheCacheInWholeBlocks) {
  Scheduler scheduler(small_config());
  add(scheduler, 1, count_up(10), 1);
  step(scheduler);
  const Sequence& s = add(scheduler, 2, count_up(11), 1);
  EXPECT_EQ(shares(step(scheduler)), (Shares{{2, 8, 3}}));
  EXPECT_EQ(s.num_cached_tokens, 8);
  const auto stats = scheduler.stats();
  EXPECT_EQ(stats.prompt_tokens, 21);
  EXPECT_EQ(stats.cached_prompt_tokens, 8);
  EXPECT_EQ(stats.generated_tokens, 2);
}

TEST(Scheduler, RecomputesTheLastTokenOfAPromptThatIsCachedInFull) {  // nano-vLLM #144, #114
  Scheduler scheduler(small_config());
  for (int id : {1, 2}) {
    add(scheduler, id, count_up(8), 1);
    const Plan plan = step(scheduler);
    ASSERT_EQ(plan.sequences.size(), 1u);
    EXPECT_GE(plan.sequences[0].num_tokens, 1);
    EXPECT_TRUE(plan.sequences[0].samples);
    EXPECT_EQ(plan.sequences[0].start, id == 1 ? 0 : 4);
  }
}

TEST(Scheduler, SequencesOfOneStepShareTheirPrefix) {  // nano-vLLM #219
  Scheduler scheduler(small_config());
  for (int id : {1, 2, 3}) {
    Tokens prompt = count_up(8);
    prompt.push_back(id);
    add(scheduler, id, prompt);
  }
  EXPECT_EQ(shares(step(scheduler)), (Shares{{1, 0, 9}, {2, 8, 1}, {3, 8, 1}}));
  EXPECT_EQ(scheduler.blocks().num_idle(), 16 - 5);
}

TEST(Scheduler, GeneratedTokensAreCachedToo) {  // the next turn of a chat
  Scheduler scheduler(small_config());
  add(scheduler, 1, count_up(3), 6);
  run_to_end(scheduler);
  Tokens next = count_up(3);
  next.insert(next.end(), 6, 1);
  next.push_back(2);
  add(scheduler, 2, next, 1);
  EXPECT_EQ(shares(step(scheduler)), (Shares{{2, 8, 2}}));
}

TEST(Scheduler, ABlockThatEndsInATokenInFlightIsCachedOnceTheTokenIsKnown) {
  Scheduler scheduler(small_config(/*num_blocks=*/8, /*block_size=*/2));
  add(scheduler, 1, {5}, 8);
  const Plan first = scheduler.schedule();
  const Plan second =
      scheduler.schedule();  // fills the block with the token that the first samples
  EXPECT_EQ(scheduler.blocks().num_cached(), 0);
  process(scheduler, first, 6);
  EXPECT_EQ(scheduler.blocks().num_cached(), 1);
  process(scheduler, second, 7);
}

TEST(Scheduler, PromptLogprobsGetNoHitsButPublish) {
  Scheduler scheduler(small_config());
  for (int id : {1, 2}) {
    auto sequence = make_sequence(id, count_up(9), 1);
    sequence->params.prompt_logprobs = 0;
    scheduler.add(std::move(sequence));
    EXPECT_EQ(shares(step(scheduler)), (Shares{{id, 0, 9}}));
  }
  add(scheduler, 3, count_up(9), 1);
  EXPECT_EQ(shares(step(scheduler)), (Shares{{3, 8, 1}}));
}

TEST(Scheduler, WithoutPrefixCachingNothingIsCached) {
  auto config = small_config();
  config.enable_prefix_caching = false;
  Scheduler scheduler(config);
  for (int id : {1, 2}) {
    add(scheduler, id, count_up(9), 1);
    EXPECT_EQ(shares(step(scheduler)), (Shares{{id, 0, 9}}));
  }
  EXPECT_EQ(scheduler.blocks().num_cached(), 0);
}

TEST(Scheduler, AResetCacheGivesNoHitsAndRunningSequencesGoOn) {
  Scheduler scheduler(small_config());
  add(scheduler, 1, count_up(9), 20);
  step(scheduler);
  scheduler.reset_prefix_cache();
  add(scheduler, 2, count_up(9), 20);
  EXPECT_EQ(shares(step(scheduler)), (Shares{{1, 9, 1}, {2, 0, 9}}));
  run_to_end(scheduler);
  EXPECT_EQ(scheduler.blocks().num_idle(), 16);
}

TEST(Scheduler, APublishedCollisionOfXxh64PoisonsNobody) {
  const auto block = [](Tokens at_240_244_248_252) {
    Tokens tokens = count_up(256, 1000);
    for (size_t i = 0; i < 4; ++i) tokens[240 + 4 * i] = at_240_244_248_252[i];
    return tokens;
  };
  const Tokens a = block({41641, 62775, 47200, 57592}), b = block({9033, 34979, 63609, 27761});
  const Tokens t1(256, 5);
  const auto join = [](Tokens x, const Tokens& y, int32_t last) {
    x.insert(x.end(), y.begin(), y.end());
    x.push_back(last);
    return x;
  };
  for (const uint64_t hash_mask : {~uint64_t{0}, uint64_t{0}}) {
    auto config = small_config(16, 256);
    config.max_num_batched_tokens = 1024;
    config.prefix_hash_mask = hash_mask;
    Scheduler scheduler(config);
    add(scheduler, 1, join(b, t1, 9), 1);  // the attacker
    step(scheduler);
    add(scheduler, 2, join(a, {}, 9), 1);  // anyone
    step(scheduler);
    const Sequence& victim = add(scheduler, 3, join(a, t1, 9), 1);
    EXPECT_EQ(shares(step(scheduler)), (Shares{{3, 256, 257}}));
    EXPECT_EQ(victim.num_cached_tokens, 256);
  }
}

// -- What nano-vLLM's users ran into.

TEST(Scheduler, ACacheExhaustedWhileDecodingPreemptsInsteadOfFailing) {  // nano-vLLM #274
  for (const int depth : {1, 2}) {
    for (const bool caching : {false, true}) {
      auto config = small_config(/*num_blocks=*/6, /*block_size=*/2);
      config.max_plans_in_flight = depth;
      config.enable_prefix_caching = caching;
      Scheduler scheduler(config);
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

TEST(Scheduler,
     PreemptionWithPrefixHitsUnder512RequestsGivesPlainOutputs) {  // nano-vLLM #211, #233
  for (const int depth : {1, 2}) {
    auto config = small_config(/*num_blocks=*/40, /*block_size=*/4);
    config.max_plans_in_flight = depth;
    config.max_num_seqs = 64;
    Scheduler scheduler(config);
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
      Scheduler scheduler(config);
      FakeRunner runner(config.num_blocks, config.block_size, 50);
      ASSERT_EQ(scheduler.refusal(prompt_size, 17 - prompt_size), std::nullopt);
      const Sequence& s = add(scheduler, 1, count_up(prompt_size), 17 - prompt_size);
      expect_plain_outputs(scheduler, runner, depth, {{1, expected_output(s, 50)}});
      EXPECT_EQ(scheduler.stats().preemptions, 0);
    }
  }
}

TEST(Scheduler, ATableCoversExactlyTheComputedTokensAtEveryBlockBoundary) {  // nano-vLLM #30, #150
  Scheduler scheduler(small_config(/*num_blocks=*/16, /*block_size=*/2));
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
  Scheduler scheduler(small_config(/*num_blocks=*/3, /*block_size=*/2));
  add(scheduler, 1, {1, 2, 3, 4, 5}, 1);
  step(scheduler);
  add(scheduler, 2, {6, 7, 8, 9, 10}, 1);  // takes all three blocks
  step(scheduler);
  const Sequence& s = add(scheduler, 3, {1, 2, 3, 4, 5}, 1);
  step(scheduler);
  EXPECT_EQ(s.num_cached_tokens, 0);
}

TEST(Scheduler,
     AnEmptyPlanIsNotInFlight) {  // MinivLLM unpacks three values of a step that returned two
  Scheduler scheduler(small_config());
  const Plan plan = scheduler.schedule();
  EXPECT_TRUE(plan.empty());
  EXPECT_EQ(plan.step, 0);
  EXPECT_EQ(scheduler.plans_in_flight(), 0);
  add(scheduler, 1, {1});
  EXPECT_EQ(scheduler.schedule().step, 1);
}

}  // namespace
}  // namespace nanovllm
