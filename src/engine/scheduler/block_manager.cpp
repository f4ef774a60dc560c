#include "engine/scheduler/block_manager.h"

#include <algorithm>
#include <bit>
#include <limits>

#include <xxhash.h>

#include "core/check.h"

namespace nanovllm {

BlockManager::BlockManager(int64_t num_blocks, int block_size, uint64_t hash_mask)
    : block_size_(block_size), hash_mask_(hash_mask) {
  check(num_blocks >= 1 && num_blocks <= std::numeric_limits<int32_t>::max() / 4,
        ErrorKind::invalid_argument, "the KV cache has {} blocks: need at least 1", num_blocks);
  check(block_size >= 1 && std::has_single_bit(static_cast<unsigned>(block_size)),
        ErrorKind::invalid_argument, "block_size is {}: need a power of two", block_size);
  const auto count = static_cast<size_t>(num_blocks);
  const auto size = static_cast<size_t>(block_size);
  blocks_.resize(count);
  tokens_.resize(count * size);
  buckets_.assign(std::bit_ceil(2 * count), kNone);
  for (int32_t block = 0; block < num_blocks; ++block) link_idle(block, /*at_front=*/false);
}

const BlockManager::Block& BlockManager::at(int32_t block) const {
  check(block >= 0 && static_cast<size_t>(block) < blocks_.size(), "no KV block {}", block);
  return blocks_[static_cast<size_t>(block)];
}

std::span<const int32_t> BlockManager::tokens_of(int32_t block) const {
  const auto size = static_cast<size_t>(block_size_);
  return std::span(tokens_).subspan(static_cast<size_t>(block) * size, size);
}

void BlockManager::link_idle(int32_t block, bool at_front) {
  Block& b = at(block);
  b.previous = at_front ? kNone : idle_back_;
  b.next = at_front ? idle_front_ : kNone;
  (b.previous == kNone ? idle_front_ : at(b.previous).next) = block;
  (b.next == kNone ? idle_back_ : at(b.next).previous) = block;
  ++num_idle_;
}

void BlockManager::unlink_idle(int32_t block) {
  Block& b = at(block);
  (b.previous == kNone ? idle_front_ : at(b.previous).next) = b.next;
  (b.next == kNone ? idle_back_ : at(b.next).previous) = b.previous;
  b.previous = b.next = kNone;
  --num_idle_;
}

int32_t BlockManager::allocate() {
  const int32_t block = idle_front_;
  if (block == kNone) return kNone;
  unlink_idle(block);
  if (at(block).cached) forget(block);
  at(block).ref_count = 1;
  return block;
}

void BlockManager::add_ref(int32_t block) {
  Block& b = at(block);
  if (b.ref_count == 0) {
    check(b.cached, "KV block {} is free: only a cached block can be referred to", block);
    unlink_idle(block);
  }
  ++b.ref_count;
}

void BlockManager::release(int32_t block) {
  Block& b = at(block);
  check(b.ref_count > 0, "KV block {} is released once too often", block);
  if (--b.ref_count == 0) link_idle(block, /*at_front=*/!b.cached);
}

std::string_view BlockManager::salt_of(int32_t block) const {
  const auto salt = salts_.find(block);
  return salt == salts_.end() ? std::string_view() : salt->second;
}

BlockManager::Hash BlockManager::hash_of(int32_t parent, std::span<const int32_t> tokens,
                                         std::string_view salt) const {
  const Hash chained = parent != kNone ? at(parent).hash
                       : salt.empty()  ? Hash{}
                                       : Hash{XXH3_64bits(salt.data(), salt.size()), 0};
  const XXH128_hash_t h =
      XXH3_128bits_withSeed(tokens.data(), tokens.size_bytes(), chained.low ^ chained.high);
  const bool whole = hash_mask_ == ~uint64_t{0};
  return {h.low64 & hash_mask_, whole ? h.high64 : 0};
}

int32_t BlockManager::find(int32_t parent, std::span<const int32_t> tokens, std::string_view salt,
                           const Hash& hash) const {
  int32_t block = buckets_[hash.low & (buckets_.size() - 1)];
  for (; block != kNone; block = at(block).next_in_bucket) {
    const Block& b = at(block);
    if (b.hash == hash && b.parent == parent && b.parent_generation == generation(parent) &&
        std::ranges::equal(tokens_of(block), tokens) &&
        (parent != kNone || salt_of(block) == salt)) {
      return block;
    }
  }
  return kNone;
}

int32_t BlockManager::find(int32_t parent, std::span<const int32_t> tokens,
                           std::string_view salt) const {
  check(tokens.size() == static_cast<size_t>(block_size_), "{} tokens are not a block of {}",
        tokens.size(), block_size_);
  return can_be_parent(parent) ? find(parent, tokens, salt, hash_of(parent, tokens, salt)) : kNone;
}

bool BlockManager::publish(int32_t parent, int32_t block, std::span<const int32_t> tokens,
                           std::string_view salt) {
  check(tokens.size() == static_cast<size_t>(block_size_), "{} tokens are not a block of {}",
        tokens.size(), block_size_);
  Block& b = at(block);
  check(b.ref_count > 0 && !b.cached && block != parent, "KV block {} cannot be published", block);
  if (!can_be_parent(parent)) return false;
  const Hash hash = hash_of(parent, tokens, salt);
  if (find(parent, tokens, salt, hash) != kNone) return false;
  if (parent == kNone && !salt.empty()) salts_[block] = salt;
  std::ranges::copy(tokens, tokens_.begin() + std::ptrdiff_t{block} * block_size_);
  b.cached = true;
  b.parent = parent;
  b.parent_generation = generation(parent);
  b.hash = hash;
  b.next_in_bucket = bucket(hash);
  bucket(hash) = block;
  ++num_cached_;
  if (records_events_) note_stored(b, tokens);
  return true;
}

void BlockManager::forget(int32_t block) {
  const Block& b = at(block);
  if (!b.cached) return;
  if (records_events_) note_removed(b);
  take_out(block);
}

void BlockManager::take_out(int32_t block) {
  Block& b = at(block);
  int32_t* link = &bucket(b.hash);
  while (*link != block) link = &at(*link).next_in_bucket;
  *link = b.next_in_bucket;
  b.next_in_bucket = b.parent = kNone;
  b.cached = false;
  salts_.erase(block);
  ++b.generation;
  --num_cached_;
  const bool in_idle_list = b.previous != kNone || b.next != kNone || idle_front_ == block;
  if (in_idle_list) {  // nothing worth keeping in it any more: the first to be taken
    unlink_idle(block);
    link_idle(block, /*at_front=*/true);
  }
}

void BlockManager::reset_prefix_cache() {
  for (int32_t block = 0; block < num_blocks(); ++block)
    if (at(block).cached) take_out(block);
  if (records_events_) events_.push_back({.kind = BlockEvent::Kind::cleared});
}

void BlockManager::forget_orphans() {
  for (bool found = true; found;) {
    found = false;
    for (int32_t block = 0; block < num_blocks(); ++block) {
      const Block& b = at(block);
      if (!b.cached || b.parent == kNone || generation(b.parent) == b.parent_generation) continue;
      forget(block);
      found = true;
    }
  }
}

// -- Events: blocks that follow one another are one event, and so are those that leave together.

void BlockManager::note_stored(const Block& block, std::span<const int32_t> tokens) {
  const bool has_parent = block.parent != kNone;
  const uint64_t parent = has_parent ? at(block.parent).hash.low : 0;
  const bool follows = has_parent && !events_.empty() &&
                       events_.back().kind == BlockEvent::Kind::stored &&
                       events_.back().hashes.back() == parent;
  if (!follows) {
    events_.push_back({.kind = BlockEvent::Kind::stored});
    if (has_parent) events_.back().parent = parent;
  }
  BlockEvent& event = events_.back();
  event.hashes.push_back(block.hash.low);
  event.tokens.insert(event.tokens.end(), tokens.begin(), tokens.end());
}

void BlockManager::note_removed(const Block& block) {
  if (events_.empty() || events_.back().kind != BlockEvent::Kind::removed)
    events_.push_back({.kind = BlockEvent::Kind::removed});
  events_.back().hashes.push_back(block.hash.low);
}

}  // namespace nanovllm
