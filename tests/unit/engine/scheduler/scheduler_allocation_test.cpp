// Counts calls of operator new: a decode step in the steady state makes none.
#include <vector>

#include <gtest/gtest.h>

#include "engine/scheduler/scheduler.h"
#include "unit/engine/scheduler/count_allocations.h"

namespace nanovllm {
namespace {

TEST(SchedulerAllocation, ADecodeStepAllocatesNothing) {
  constexpr int kSequences = 64, kSteps = 300;
  SchedulerConfig config;
  config.block_size = 16;
  config.num_blocks = 4096;
  Scheduler scheduler(config);
  std::vector<Sequence> sequences(kSequences);
  for (int id = 0; id < kSequences; ++id) {
    Sequence& sequence = sequences[static_cast<size_t>(id)];
    sequence.request_id = id;
    sequence.token_ids.assign(static_cast<size_t>(10 + id), id);
    sequence.num_prompt_tokens = sequence.num_tokens();
    sequence.max_tokens = kSteps + 10;
    scheduler.add(sequence);
  }
  std::vector<Plan> plans(2);
  const std::vector<int32_t> sampled(kSequences, 7);
  scheduler.schedule(plans[0]);
  scheduler.schedule(plans[1]);
  scheduler.process(plans[0], sampled);
  scheduler.schedule(plans[0]);

  const int64_t before = num_allocations;
  for (int i = 1; i < kSteps; ++i) {  // crosses block boundaries, publishes blocks
    Plan& oldest = plans[static_cast<size_t>(i % 2)];
    scheduler.process(oldest, sampled);
    scheduler.schedule(oldest);
  }
  EXPECT_EQ(num_allocations - before, 0);
  EXPECT_GT(before, 0);
  EXPECT_EQ(scheduler.stats().generated_tokens, kSequences * kSteps);
}

}  // namespace
}  // namespace nanovllm
