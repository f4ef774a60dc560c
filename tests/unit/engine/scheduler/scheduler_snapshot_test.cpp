#include <gtest/gtest.h>

#include "engine/scheduler/scheduler.h"
#include "unit/engine/scheduler/scheduler_rig.h"

namespace nanovllm {
namespace {

EngineSnapshot look(const Scheduler& scheduler, int64_t most = 100) {
  EngineSnapshot snapshot;
  scheduler.add_to(snapshot, most);
  return snapshot;
}
using Blocks = std::vector<BlockState>;
constexpr auto kFree = BlockState::free, kCached = BlockState::cached, kUsed = BlockState::used,
               kBoth = BlockState::used_and_cached;

// Blocks of 4 tokens, taken from the front. The second prompt begins with the first one's 8 tokens.
TEST(SchedulerSnapshot, TellsFreeUsedSharedAndCachedBlocksApart) {
  OwningScheduler scheduler(small_config(/*num_blocks=*/8, /*block_size=*/4));
  EXPECT_EQ(look(scheduler).blocks, Blocks(8, kFree));
  add(scheduler, 1, count_up(10), 4);
  step(scheduler);
  EXPECT_EQ(look(scheduler).blocks,
            (Blocks{kBoth, kBoth, kUsed, kFree, kFree, kFree, kFree, kFree}));
  std::vector<int32_t> longer = count_up(8);
  longer.push_back(77);
  add(scheduler, 2, longer, 4);
  step(scheduler);
  const EngineSnapshot both = look(scheduler);
  ASSERT_EQ(both.running.size(), 2u);
  EXPECT_EQ(both.running[0].block_table, (std::vector<int32_t>{0, 1, 2}));
  EXPECT_EQ(both.running[1].block_table, (std::vector<int32_t>{0, 1, 3}));
  EXPECT_EQ(both.running[1].num_cached_tokens, 8);
  EXPECT_EQ(both.blocks, (Blocks{kBoth, kBoth, kUsed, kUsed, kFree, kFree, kFree, kFree}));
  scheduler.finish(1, FinishReason::abort);
  scheduler.finish(2, FinishReason::abort);
  EXPECT_EQ(look(scheduler).blocks,
            (Blocks{kCached, kCached, kFree, kFree, kFree, kFree, kFree, kFree}));
}

TEST(SchedulerSnapshot, TellsHowFarEachSequenceIsAndWhatItsLastStepDid) {
  auto config = small_config(/*num_blocks=*/16, /*block_size=*/4);
  config.max_num_batched_tokens = 6;
  config.max_num_seqs = 1;
  OwningScheduler scheduler(config);
  add(scheduler, 1, count_up(10), 4);
  for (int id = 2; id < 6; ++id) add(scheduler, id, count_up(3, 20 * id), 2);
  step(scheduler);  // a chunk of 6 of the first prompt
  const EngineSnapshot chunk = look(scheduler, 3);
  ASSERT_EQ(chunk.running.size(), 1u);
  EXPECT_EQ(chunk.running[0].num_prompt_tokens, 10);
  EXPECT_EQ(chunk.running[0].num_computed_tokens, 6);
  EXPECT_EQ(chunk.running[0].num_scheduled_tokens, 6);
  EXPECT_EQ(chunk.running[0].max_tokens, 4);
  ASSERT_EQ(chunk.waiting.size(), 3u);  // as many as were asked for
  EXPECT_EQ(chunk.waiting[0].arrival, 2);
  EXPECT_EQ(chunk.waiting[0].num_scheduled_tokens, 0);
  step(scheduler);  // the other 4, and a token
  step(scheduler);  // a decode
  const SequenceSnapshot decode = look(scheduler).running.at(0);
  EXPECT_EQ(decode.num_computed_tokens, 11);
  EXPECT_EQ(decode.num_generated, 2);
  EXPECT_EQ(decode.num_scheduled_tokens, 1);
}

}  // namespace
}  // namespace nanovllm
