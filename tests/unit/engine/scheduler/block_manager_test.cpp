#include "engine/scheduler/block_manager.h"

#include <algorithm>
#include <array>
#include <numeric>

#include <gtest/gtest.h>

#include "nanovllm/error.h"

#include "unit/engine/scheduler/integrity.h"

namespace nanovllm {
namespace {

using Tokens = std::vector<int32_t>;
constexpr int32_t kNone = BlockManager::kNone;

// A block that holds `tokens` after `parent`, published.
int32_t publish_new(BlockManager& blocks, int32_t parent, const Tokens& tokens) {
  const int32_t block = blocks.allocate();
  EXPECT_TRUE(blocks.publish(parent, block, tokens));
  return block;
}

TEST(BlockManager, GivesOutEveryBlockOnceAndThenNone) {
  BlockManager blocks(3, 4);
  std::vector<int32_t> given = {blocks.allocate(), blocks.allocate(), blocks.allocate()};
  std::ranges::sort(given);
  EXPECT_EQ(given, (std::vector<int32_t>{0, 1, 2}));
  EXPECT_EQ(blocks.allocate(), kNone);
  EXPECT_EQ(blocks.num_idle(), 0);
  Integrity::verify(blocks);
}

TEST(BlockManager, ReturnsABlockToThePoolWithItsLastReference) {
  BlockManager blocks(1, 1);
  const int32_t block = blocks.allocate();
  blocks.add_ref(block);
  blocks.release(block);
  EXPECT_EQ(blocks.num_idle(), 0);
  blocks.release(block);
  EXPECT_EQ(blocks.num_idle(), 1);
  Integrity::verify(blocks);
}

TEST(BlockManager, RefusesAReleaseTooManyAndAReferenceToAFreeBlock) {
  BlockManager blocks(2, 1);
  const int32_t block = blocks.allocate();
  blocks.release(block);
  EXPECT_THROW(blocks.release(block), Error);
  EXPECT_THROW(blocks.add_ref(block), Error);
  EXPECT_THROW(blocks.add_ref(2), Error);
  EXPECT_THROW(blocks.add_ref(-1), Error);
  Integrity::verify(blocks);
}

TEST(BlockManager, RefusesSizesThatAreNoSizes) {
  EXPECT_THROW(BlockManager(0, 16), Error);
  EXPECT_THROW(BlockManager(8, 0), Error);
  EXPECT_THROW(BlockManager(8, 12), Error);
  EXPECT_THROW(BlockManager(8, -4), Error);
  EXPECT_NO_THROW(BlockManager(1, 1));
}

TEST(BlockManager, FindsAPrefixBlockByBlock) {
  BlockManager blocks(4, 2);
  const int32_t first = publish_new(blocks, kNone, {1, 2});
  const int32_t second = publish_new(blocks, first, {3, 4});
  EXPECT_EQ(blocks.find(kNone, Tokens{1, 2}), first);
  EXPECT_EQ(blocks.find(first, Tokens{3, 4}), second);
  EXPECT_EQ(blocks.find(kNone, Tokens{3, 4}), kNone);  // not at the start of a sequence
  EXPECT_EQ(blocks.find(first, Tokens{3, 5}), kNone);
  EXPECT_EQ(blocks.find(second, Tokens{3, 4}), kNone);
  EXPECT_THROW((void)blocks.find(kNone, Tokens{1}), Error);
}

TEST(BlockManager, FreedBlocksStayCachedUntilEvicted) {
  BlockManager blocks(2, 1);
  const int32_t block = publish_new(blocks, kNone, {7});
  blocks.release(block);
  EXPECT_EQ(blocks.num_idle(), 2);
  EXPECT_EQ(blocks.find(kNone, Tokens{7}), block);
  EXPECT_NE(blocks.allocate(), block);  // free blocks go before cached ones
  EXPECT_EQ(blocks.find(kNone, Tokens{7}), block);
  EXPECT_EQ(blocks.allocate(), block);
  EXPECT_EQ(blocks.find(kNone, Tokens{7}), kNone);
  EXPECT_EQ(blocks.num_cached(), 0);
  Integrity::verify(blocks);
}

TEST(BlockManager, EvictsTheLeastRecentlyReleasedFirst) {
  BlockManager blocks(3, 1);
  const int32_t a = publish_new(blocks, kNone, {1});
  const int32_t b = publish_new(blocks, kNone, {2});
  const int32_t c = publish_new(blocks, kNone, {3});
  for (const int32_t block : {b, a, c}) blocks.release(block);
  blocks.add_ref(b);  // used again: now the newest
  blocks.release(b);
  EXPECT_EQ(blocks.allocate(), a);
  EXPECT_EQ(blocks.allocate(), c);
  EXPECT_EQ(blocks.allocate(), b);
}

TEST(BlockManager, NeverEvictsABlockInUse) {
  BlockManager blocks(2, 1);
  const int32_t a = publish_new(blocks, kNone, {1});
  const int32_t b = publish_new(blocks, a, {2});
  blocks.release(b);
  EXPECT_EQ(blocks.allocate(), b);
  EXPECT_EQ(blocks.allocate(), kNone);
  EXPECT_EQ(blocks.find(kNone, Tokens{1}), a);
}

TEST(BlockManager, KeepsTheFirstOfTwoEqualBlocks) {
  BlockManager blocks(2, 1);
  const int32_t first = publish_new(blocks, kNone, {1});
  const int32_t second = blocks.allocate();
  EXPECT_FALSE(blocks.publish(kNone, second, Tokens{1}));
  EXPECT_EQ(blocks.find(kNone, Tokens{1}), first);
  EXPECT_FALSE(blocks.is_cached(second));
  blocks.release(second);
  EXPECT_EQ(blocks.allocate(), second);  // private: free as soon as it is released
}

TEST(BlockManager, ForgetsTheChildrenOfAnEvictedBlockEvenIfItsNumberComesBack) {
  BlockManager blocks(2, 1);
  const int32_t parent = publish_new(blocks, kNone, {1});
  const int32_t child = publish_new(blocks, parent, {2});
  blocks.release(parent);  // the wrong order, on purpose: the parent goes first
  EXPECT_EQ(blocks.allocate(), parent);
  ASSERT_TRUE(blocks.publish(kNone, parent, Tokens{9}));  // the same number, another content
  EXPECT_EQ(blocks.find(parent, Tokens{2}), kNone);
  const int32_t same = parent;
  blocks.release(same);
  EXPECT_EQ(blocks.allocate(), same);
  // Even with the old content it is another entry.
  ASSERT_TRUE(blocks.publish(kNone, same, Tokens{1}));
  EXPECT_EQ(blocks.find(same, Tokens{2}), kNone);
  blocks.release(child);
  Integrity::verify(blocks);
}

TEST(BlockManager, PublishesNothingUnderABlockThatIsNotCached) {
  BlockManager blocks(2, 1);
  const int32_t parent = blocks.allocate();
  const int32_t child = blocks.allocate();
  EXPECT_FALSE(blocks.publish(parent, child, Tokens{2}));
  EXPECT_EQ(blocks.find(parent, Tokens{2}), kNone);
  EXPECT_EQ(blocks.num_cached(), 0);
}

TEST(BlockManager, ResetForgetsEverythingButTakesNothingAway) {
  BlockManager blocks(3, 1);
  const int32_t used = publish_new(blocks, kNone, {1});
  const int32_t idle = publish_new(blocks, used, {2});
  blocks.release(idle);
  blocks.reset_prefix_cache();
  EXPECT_EQ(blocks.num_cached(), 0);
  EXPECT_EQ(blocks.find(kNone, Tokens{1}), kNone);
  EXPECT_EQ(blocks.ref_count(used), 1);
  EXPECT_EQ(blocks.num_idle(), 2);
  EXPECT_FALSE(blocks.publish(used, blocks.allocate(), Tokens{2}));
  Integrity::verify(blocks);
}

TEST(BlockManager, IsRightThoughAllHashesAreEqual) {
  BlockManager blocks(64, 2, /*hash_mask=*/0);
  std::vector<int32_t> chain;
  int32_t parent = kNone;
  for (int32_t i = 0; i < 64; ++i) {
    parent = publish_new(blocks, parent, {i % 3, i % 2});
    chain.push_back(parent);
  }
  parent = kNone;
  for (int32_t i = 0; i < 64; ++i) {
    EXPECT_EQ(blocks.find(parent, Tokens{i % 3, i % 2}), chain[static_cast<size_t>(i)]);
    EXPECT_EQ(blocks.find(parent, Tokens{i % 3, 2}), kNone);
    parent = chain[static_cast<size_t>(i)];
  }
  for (const int32_t block : {13, 0, 63, 31}) blocks.forget(block);
  Integrity::verify(blocks);
  EXPECT_EQ(blocks.num_cached(), 60);
}

// Two blocks of 256 tokens whose little-endian int64 values have the same XXH64, a86f9d2d52d090e3
// (found by search; nano-vLLM's key).
Tokens colliding_block(std::array<int32_t, 4> at_240_244_248_252) {
  Tokens tokens(256);
  std::iota(tokens.begin(), tokens.end(), 1000);
  for (size_t i = 0; i < 4; ++i) tokens[240 + 4 * i] = at_240_244_248_252[i];
  return tokens;
}

// The attacker computes B.t1, anyone computes A; a victim who asks for A.t1 must not get the
// attacker's second block.
void expect_one_block_for_the_victim(uint64_t hash_mask) {
  const Tokens a = colliding_block({41641, 62775, 47200, 57592});
  const Tokens b = colliding_block({9033, 34979, 63609, 27761});
  const Tokens t1(256, 5);
  BlockManager blocks(4, 256, hash_mask);
  const int32_t block_b = publish_new(blocks, kNone, b);
  const int32_t attackers_t1 = publish_new(blocks, block_b, t1);
  const int32_t block_a = publish_new(blocks, kNone, a);
  EXPECT_EQ(blocks.find(kNone, a), block_a);
  EXPECT_EQ(blocks.find(block_a, t1), kNone);
  EXPECT_EQ(blocks.find(block_b, t1), attackers_t1);
}

TEST(BlockManager, IsNotPoisonedByThePublishedCollisionOfXxh64) {
  expect_one_block_for_the_victim(~uint64_t{0});
}

TEST(BlockManager, IsNotPoisonedByACollisionOfItsOwnHash) {
  expect_one_block_for_the_victim(0xf);
  expect_one_block_for_the_victim(0);
}

}  // namespace
}  // namespace nanovllm
