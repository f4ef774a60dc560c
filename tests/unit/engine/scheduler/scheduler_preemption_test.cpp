// Steps in flight, and sequences that lose their blocks.
#include <gtest/gtest.h>

#include "unit/engine/scheduler/scheduler_rig.h"

namespace nanovllm {
namespace {

// -- Steps in flight.

TEST(Scheduler, PlansTheNextStepBeforeTheTokenIsKnown) {
  OwningScheduler scheduler(small_config());
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
  OwningScheduler scheduler(small_config());
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
  OwningScheduler scheduler(small_config());
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
  OwningScheduler scheduler(small_config(/*num_blocks=*/4));
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
  OwningScheduler scheduler(config);
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
  OwningScheduler scheduler(config);
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
  OwningScheduler scheduler(small_config(/*num_blocks=*/3, /*block_size=*/2));
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
  OwningScheduler scheduler(config);
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

}  // namespace
}  // namespace nanovllm
