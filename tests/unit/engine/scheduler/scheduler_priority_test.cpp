// The order of service.
#include <gtest/gtest.h>

#include "unit/engine/scheduler/scheduler_rig.h"

namespace nanovllm {
namespace {

Sequence& add_with(OwningScheduler& scheduler, int64_t id, int64_t priority, Tokens prompt = {1, 2},
                   int64_t max_tokens = 1) {
  auto sequence = make_sequence(id, std::move(prompt), max_tokens);
  sequence->params.priority = priority;
  return scheduler.add(std::move(sequence));
}

TEST(Scheduler, ServesTheLowerPriorityFirstAndEqualOnesInOrder) {
  SchedulerConfig config = small_config();
  config.max_num_seqs = 1;
  for (const bool has_priorities : {true, false}) {
    config.has_priorities = has_priorities;
    OwningScheduler scheduler(config);
    for (const auto& [id, priority] :
         {std::pair{1, 0}, std::pair{2, 5}, std::pair{3, -1}, std::pair{4, 0}, std::pair{5, -1}})
      add_with(scheduler, id, priority);
    std::vector<int64_t> order;
    for (int i = 0; i < 5; ++i) order.push_back(std::get<0>(shares(step(scheduler)).at(0)));
    EXPECT_EQ(order, has_priorities ? (std::vector<int64_t>{3, 5, 1, 4, 2})
                                    : (std::vector<int64_t>{1, 2, 3, 4, 5}));
  }
}

// Or a stream of urgent requests would keep it waiting for ever.
TEST(Scheduler, ARequestIsOvertakenByAsManyLaterOnesAsItsPriorityIsWorth) {
  SchedulerConfig config = small_config();
  config.max_num_seqs = 1;
  config.has_priorities = true;
  OwningScheduler scheduler(config);
  add_with(scheduler, 1, 2);
  int64_t overtaken = 0;
  for (int64_t id = 2;; ++id, ++overtaken) {
    add_with(scheduler, id, 0);
    if (std::get<0>(shares(step(scheduler)).at(0)) == 1) break;
    ASSERT_LT(overtaken, 1000);
  }
  EXPECT_EQ(overtaken, 2 * Scheduler::kPriorityAge - 1);
}

TEST(Scheduler, PreemptsTheLeastUrgent) {
  SchedulerConfig config = small_config(/*num_blocks=*/6);
  config.has_priorities = true;
  OwningScheduler scheduler(config);
  add_with(scheduler, 1, 1, count_up(8), 9);
  add_with(scheduler, 2, 0, count_up(8, 50), 9);
  step(scheduler);
  while (scheduler.stats().preemptions == 0) step(scheduler);
  EXPECT_EQ(scheduler.find(1)->num_preemptions, 1);
  EXPECT_EQ(scheduler.find(2)->num_preemptions, 0);
  run_to_end(scheduler);
}

}  // namespace
}  // namespace nanovllm
