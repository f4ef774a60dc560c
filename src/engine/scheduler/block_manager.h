// BlockManager: who owns which block of the paged KV cache, and which blocks hold a prefix that
// another sequence may reuse.
//
// A block is either in use (referenced by block tables) or idle. Idle blocks form one list, taken
// from the front: blocks without reusable content first, then cached ones, least recently released
// first. allocate, add_ref, release and eviction are O(1) on flat arrays.
//
// Prefix cache. A full block whose tokens are known can be published: it becomes an entry under the
// block that precedes it in its sequence. An entry is identified by (parent block, that block's
// generation, its tokens), and a hit compares all three: the hash only finds candidates,
// correctness never rests on it. A block's generation counts how often it left the cache, so
// whatever was published under an evicted block is never found again, even when the same block
// number gets a new content. Below no block stands the salt in its place: prefixes of different
// salts are different from their first block on.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kv_events/block_event.h"

namespace nanovllm {

class BlockManager {
 public:
  static constexpr int32_t kNone = -1;  // no block; as a parent: the start of a sequence

  /// block_size is a power of two. `hash_mask` is for tests: 64-bit hashes are cut to its bits, so
  /// that they collide.
  BlockManager(int64_t num_blocks, int block_size, uint64_t hash_mask = ~uint64_t{0});

  int64_t num_blocks() const { return static_cast<int64_t>(blocks_.size()); }
  int block_size() const { return block_size_; }
  int64_t num_idle() const { return num_idle_; }      // can be allocated now, cached or not
  int64_t num_cached() const { return num_cached_; }  // published, in use or idle
  int32_t ref_count(int32_t block) const { return at(block).ref_count; }
  bool is_cached(int32_t block) const { return at(block).cached; }

  /// An idle block, with one reference; evicts the least recently released entry if need be. kNone
  /// if every block is in use.
  int32_t allocate();
  /// One more reference, to a block in use or to an idle one that is cached.
  void add_ref(int32_t block);
  /// One reference less. The last one makes the block idle; if it is cached its content stays until
  /// evicted. Release a sequence's blocks last to first: then a block is evicted before the one it
  /// depends on.
  void release(int32_t block);

  /// The cached block that holds `tokens` (block_size of them) right after the block `parent`, or
  /// kNone. `salt` matters only at the start of a sequence.
  int32_t find(int32_t parent, std::span<const int32_t> tokens, std::string_view salt = {}) const;
  /// Enters `block`, which is in use, in the cache. False, and nothing changes, if `parent` is no
  /// longer cached or an equal entry exists: the first one stays, this block remains private to its
  /// sequence.
  bool publish(int32_t parent, int32_t block, std::span<const int32_t> tokens,
               std::string_view salt = {});
  /// Takes a block out of the cache, and with it all that was published after it. A sequence
  /// that refers to it keeps it.
  void forget(int32_t block);
  void reset_prefix_cache();
  /// Takes out what forget() has left behind: blocks that follow one which is gone, and that
  /// find() finds no more. O(num_blocks).
  void forget_orphans();

  /// From now on, notes what enters and leaves the cache, in order.
  void record_events() { records_events_ = true; }
  /// The events that were noted since the last call.
  std::vector<BlockEvent> take_events() { return std::exchange(events_, {}); }

 private:
  friend class Integrity;  // the tests' check of all invariants
  struct Hash {
    uint64_t low = 0, high = 0;
    bool operator==(const Hash&) const = default;
  };
  struct Block {
    int32_t ref_count = 0;
    bool cached = false;
    int32_t previous = kNone, next = kNone;  // idle list
    // The entry, while cached:
    int32_t parent = kNone;
    int32_t next_in_bucket = kNone;
    uint64_t generation = 0;  // how often this block left the cache
    uint64_t parent_generation = 0;
    Hash hash;
  };

  const Block& at(int32_t block) const;
  Block& at(int32_t block) { return const_cast<Block&>(std::as_const(*this).at(block)); }
  bool can_be_parent(int32_t block) const { return block == kNone || at(block).cached; }
  uint64_t generation(int32_t block) const { return block == kNone ? 0 : at(block).generation; }
  std::span<const int32_t> tokens_of(int32_t block) const;
  std::string_view salt_of(int32_t block) const;
  Hash hash_of(int32_t parent, std::span<const int32_t> tokens, std::string_view salt) const;
  int32_t& bucket(const Hash& hash) { return buckets_[hash.low & (buckets_.size() - 1)]; }
  int32_t find(int32_t parent, std::span<const int32_t> tokens, std::string_view salt,
               const Hash& hash) const;
  void take_out(int32_t block);
  void note_stored(const Block& block, std::span<const int32_t> tokens);
  void note_removed(const Block& block);
  void link_idle(int32_t block, bool at_front);
  void unlink_idle(int32_t block);

  int block_size_;
  uint64_t hash_mask_;
  std::vector<Block> blocks_;
  std::vector<int32_t> tokens_;   // [num_blocks, block_size]: what a cached block holds
  std::vector<int32_t> buckets_;  // heads of the chains of entries; a power of two
  std::unordered_map<int32_t, std::string> salts_;  // of cached first blocks that have one
  int32_t idle_front_ = kNone, idle_back_ = kNone;
  int64_t num_idle_ = 0, num_cached_ = 0;
  bool records_events_ = false;
  std::vector<BlockEvent> events_;
};

}  // namespace nanovllm
