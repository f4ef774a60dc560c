// The blocks that the scheduler takes from the prefix cache, and those that it leaves there.
#include <gtest/gtest.h>

#include "unit/engine/scheduler/scheduler_rig.h"

namespace nanovllm {
namespace {

TEST(Scheduler, TakesAKnownPrefixFromTheCacheInWholeBlocks) {
  OwningScheduler scheduler(small_config());
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
  OwningScheduler scheduler(small_config());
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
  OwningScheduler scheduler(small_config());
  for (int id : {1, 2, 3}) {
    Tokens prompt = count_up(8);
    prompt.push_back(id);
    add(scheduler, id, prompt);
  }
  const Plan first = step(scheduler);
  EXPECT_EQ(shares(first), (Shares{{1, 0, 9}, {2, 8, 1}, {3, 8, 1}}));
  EXPECT_EQ(std::ranges::count(first.sequences, true, &ScheduledSequence::is_new), 3);
  EXPECT_EQ(scheduler.blocks().num_idle(), 16 - 5);
  const Plan second = step(scheduler);
  EXPECT_EQ(std::ranges::count(second.sequences, false, &ScheduledSequence::is_new), 3);
}

TEST(Scheduler, GeneratedTokensAreCachedToo) {  // the next turn of a chat
  OwningScheduler scheduler(small_config());
  add(scheduler, 1, count_up(3), 6);
  run_to_end(scheduler);
  Tokens next = count_up(3);
  next.insert(next.end(), 6, 1);
  next.push_back(2);
  add(scheduler, 2, next, 1);
  EXPECT_EQ(shares(step(scheduler)), (Shares{{2, 8, 2}}));
}

TEST(Scheduler, ABlockThatEndsInATokenInFlightIsCachedOnceTheTokenIsKnown) {
  OwningScheduler scheduler(small_config(/*num_blocks=*/8, /*block_size=*/2));
  add(scheduler, 1, {5}, 8);
  const Plan first = scheduler.schedule();
  // The second fills the block with the token that the first samples.
  const Plan second = scheduler.schedule();
  EXPECT_EQ(scheduler.blocks().num_cached(), 0);
  process(scheduler, first, 6);
  EXPECT_EQ(scheduler.blocks().num_cached(), 1);
  process(scheduler, second, 7);
}

TEST(Scheduler, PromptLogprobsGetNoHitsButPublish) {
  OwningScheduler scheduler(small_config());
  for (int id : {1, 2}) {
    auto sequence = make_sequence(id, count_up(9), 1);
    sequence->params.prompt_logprobs = 0;
    scheduler.add(std::move(sequence));
    EXPECT_EQ(shares(step(scheduler)), (Shares{{id, 0, 9}}));
  }
  add(scheduler, 3, count_up(9), 1);
  EXPECT_EQ(shares(step(scheduler)), (Shares{{3, 8, 1}}));
}

TEST(Scheduler, HitsAreWithinOneSalt) {
  OwningScheduler scheduler(small_config());
  int64_t id = 0;
  const auto cached = [&](const std::string& salt) {
    auto sequence = make_sequence(++id, count_up(12), 1);
    sequence->params.cache_salt = salt;
    const Sequence& s = scheduler.add(std::move(sequence));
    step(scheduler);
    Integrity::verify(scheduler);
    return s.num_cached_tokens;
  };
  for (const std::string salt : {"", "a", "b"}) {
    EXPECT_EQ(cached(salt), 0) << salt;
    EXPECT_EQ(cached(salt), 8) << salt;
  }
  EXPECT_EQ(cached(""), 8);
  scheduler.reset_prefix_cache();
  EXPECT_EQ(cached("a"), 0);
}

TEST(Scheduler, WithoutPrefixCachingNothingIsCached) {
  auto config = small_config();
  config.enable_prefix_caching = false;
  OwningScheduler scheduler(config);
  for (int id : {1, 2}) {
    add(scheduler, id, count_up(9), 1);
    EXPECT_EQ(shares(step(scheduler)), (Shares{{id, 0, 9}}));
  }
  EXPECT_EQ(scheduler.blocks().num_cached(), 0);
}

TEST(Scheduler, AResetCacheGivesNoHitsAndRunningSequencesGoOn) {
  OwningScheduler scheduler(small_config());
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
    OwningScheduler scheduler(config);
    add(scheduler, 1, join(b, t1, 9), 1);  // the attacker
    step(scheduler);
    add(scheduler, 2, join(a, {}, 9), 1);  // anyone
    step(scheduler);
    const Sequence& victim = add(scheduler, 3, join(a, t1, 9), 1);
    EXPECT_EQ(shares(step(scheduler)), (Shares{{3, 256, 257}}));
    EXPECT_EQ(victim.num_cached_tokens, 256);
  }
}

}  // namespace
}  // namespace nanovllm
