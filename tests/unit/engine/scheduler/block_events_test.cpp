// The events by which BlockManager tells of the prefix cache, and that whoever follows it knows the
// cache.
#include <gtest/gtest.h>

#include "engine/scheduler/block_manager.h"
#include "kv_events/block_event.h"
#include "unit/engine/scheduler/cache_run.h"
#include "unit/engine/scheduler/integrity.h"

namespace nanovllm {
namespace {

using Kind = BlockEvent::Kind;
constexpr int32_t kNone = BlockManager::kNone;

int32_t publish_new(BlockManager& blocks, int32_t parent, const Tokens& tokens,
                    const std::string& salt = {}) {
  const int32_t block = blocks.allocate();
  EXPECT_TRUE(blocks.publish(parent, block, tokens, salt));
  return block;
}

TEST(BlockEvents, NothingIsNotedUnlessAskedFor) {
  BlockManager blocks(2, 2);
  publish_new(blocks, kNone, {1, 2});
  blocks.reset_prefix_cache();
  EXPECT_TRUE(blocks.take_events().empty());
}

TEST(BlockEvents, BlocksThatFollowOneAnotherAreOneEvent) {
  BlockManager blocks(4, 2);
  blocks.record_events();
  const int32_t first = publish_new(blocks, kNone, {1, 2});
  publish_new(blocks, first, {3, 4});
  auto events = blocks.take_events();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind, Kind::stored);
  EXPECT_EQ(events[0].tokens, (Tokens{1, 2, 3, 4}));
  EXPECT_FALSE(events[0].parent);
  ASSERT_EQ(events[0].hashes.size(), 2u);

  publish_new(blocks, first, {5, 6});
  const auto more = blocks.take_events();
  ASSERT_EQ(more.size(), 1u);
  EXPECT_EQ(more[0].parent, events[0].hashes[0]);
  EXPECT_EQ(more[0].tokens, (Tokens{5, 6}));
  EXPECT_NE(more[0].hashes, std::vector{events[0].hashes[1]});
  EXPECT_TRUE(blocks.take_events().empty());
}

TEST(BlockEvents, ABlockThatIsTakenForAnotherContentIsRemoved) {
  BlockManager blocks(1, 2);
  blocks.record_events();
  const int32_t block = publish_new(blocks, kNone, {1, 2});
  blocks.release(block);
  publish_new(blocks, kNone, {3, 4});
  const auto events = blocks.take_events();
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[1].kind, Kind::removed);
  EXPECT_EQ(events[1].hashes, events[0].hashes);
  EXPECT_EQ(events[2].tokens, (Tokens{3, 4}));
}

TEST(BlockEvents, AnEqualBlockIsToldOfOnce) {
  BlockManager blocks(2, 2);
  blocks.record_events();
  publish_new(blocks, kNone, {1, 2});
  EXPECT_FALSE(blocks.publish(kNone, blocks.allocate(), Tokens{1, 2}));
  EXPECT_EQ(blocks.take_events().size(), 1u);
}

TEST(BlockEvents, EqualTokensOfAnotherSaltHaveAnotherHash) {
  BlockManager blocks(2, 2);
  blocks.record_events();
  publish_new(blocks, kNone, {1, 2});
  publish_new(blocks, kNone, {1, 2}, "pepper");
  const auto events = blocks.take_events();
  ASSERT_EQ(events.size(), 2u);
  EXPECT_NE(events[0].hashes, events[1].hashes);
}

TEST(BlockEvents, AResetIsOneEvent) {
  BlockManager blocks(4, 2);
  blocks.record_events();
  publish_new(blocks, publish_new(blocks, kNone, {1, 2}), {3, 4});
  blocks.take_events();
  blocks.reset_prefix_cache();
  const auto events = blocks.take_events();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind, Kind::cleared);
}

TEST(BlockEvents, BlocksAfterAForgottenOneAreRemovedWithIt) {
  BlockManager blocks(4, 2);
  blocks.record_events();
  const int32_t first = publish_new(blocks, kNone, {1, 2});
  publish_new(blocks, publish_new(blocks, first, {3, 4}), {5, 6});
  blocks.take_events();
  blocks.forget(first);
  blocks.forget_orphans();
  Integrity::verify(blocks);
  const auto events = blocks.take_events();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].hashes.size(), 3u);
  EXPECT_EQ(blocks.num_cached(), 0);
}

/// Knows what the events say, and nothing else.
class Follower {
 public:
  void apply(const BlockEvent& event) {
    if (event.kind == Kind::cleared) return prefixes_.clear();
    std::string prefix = event.parent ? prefixes_.at(*event.parent) : "";
    for (size_t i = 0; i < event.hashes.size(); ++i) {
      if (event.kind == Kind::removed) {
        ASSERT_EQ(prefixes_.erase(event.hashes[i]), 1u);
        continue;
      }
      prefix += static_cast<char>(event.tokens.at(i * CacheRun::kBlockSize));
      ASSERT_TRUE(prefixes_.emplace(event.hashes[i], prefix).second) << prefix;
    }
  }
  std::multiset<std::string> cached() const {
    std::multiset<std::string> all;
    for (const auto& [hash, prefix] : prefixes_) all.insert(prefix);
    return all;
  }

 private:
  std::map<uint64_t, std::string> prefixes_;
};

TEST(BlockEvents, WhoFollowsThemKnowsWhatAPromptWouldFind) {
  for (uint64_t seed = 0; seed < 8; ++seed) {
    CacheRun run(seed);
    Follower follower;
    for (int step = 0; step < 2000; ++step) {
      run.step();
      for (const BlockEvent& event : run.take_events())
        ASSERT_NO_FATAL_FAILURE(follower.apply(event)) << "seed " << seed << ", step " << step;
      ASSERT_EQ(follower.cached(), run.cached()) << "seed " << seed << ", step " << step;
    }
  }
}

}  // namespace
}  // namespace nanovllm
