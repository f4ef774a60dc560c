// Long runs of random operations on the BlockManager, compared after each with a simple model of
// what it should do, with every invariant checked. The model knows no hash, no generation and no
// linked list.
#include <algorithm>
#include <list>
#include <map>

#include <gtest/gtest.h>

#include "core/check.h"
#include "engine/scheduler/block_manager.h"
#include "unit/engine/scheduler/integrity.h"
#include "unit/engine/scheduler/model_based.h"

namespace nanovllm {
namespace {

/// The promise of BlockManager, in the most obvious data structures. Every entry has a serial
/// number of its own, never used twice.
class BlockManagerModel {
 public:
  using Tokens = std::vector<int32_t>;

  explicit BlockManagerModel(int64_t num_blocks) {
    for (int32_t block = 0; block < num_blocks; ++block) idle_.push_back(block);
  }

  int32_t allocate() {
    if (idle_.empty()) return BlockManager::kNone;
    const int32_t block = idle_.front();
    idle_.pop_front();
    forget(block);
    references_[block] = 1;
    return block;
  }
  void add_ref(int32_t block) {
    if (references_[block]++ == 0) idle_.remove(block);
  }
  void release(int32_t block) {
    if (--references_[block] > 0) return;
    serials_.contains(block) ? idle_.push_back(block) : idle_.push_front(block);
  }
  int32_t find(int32_t parent, const Tokens& tokens, const std::string& salt) const {
    if (!has_serial(parent)) return BlockManager::kNone;
    const auto it = entries_.find(key(parent, tokens, salt));
    return it == entries_.end() ? BlockManager::kNone : it->second;
  }
  bool publish(int32_t parent, int32_t block, const Tokens& tokens, const std::string& salt) {
    if (!has_serial(parent) || find(parent, tokens, salt) != BlockManager::kNone) return false;
    entries_[key(parent, tokens, salt)] = block;
    serials_[block] = ++last_serial_;
    return true;
  }
  void forget(int32_t block) {
    if (serials_.erase(block) == 0) return;
    std::erase_if(entries_, [&](const auto& entry) { return entry.second == block; });
    if (references_[block] == 0 && std::ranges::count(idle_, block) > 0) {
      idle_.remove(block);
      idle_.push_front(block);
    }
  }

  int references(int32_t block) { return references_[block]; }
  bool is_cached(int32_t block) const { return serials_.contains(block); }
  int64_t num_idle() const { return std::ssize(idle_); }
  int64_t num_cached() const { return std::ssize(serials_); }

 private:
  using Key = std::tuple<int64_t, Tokens, std::string>;  // parent's serial, tokens, salt of a first

  Key key(int32_t parent, const Tokens& tokens, const std::string& salt) const {
    return {serial(parent), tokens, parent == BlockManager::kNone ? salt : ""};
  }
  bool has_serial(int32_t block) const {
    return block == BlockManager::kNone || serials_.contains(block);
  }
  int64_t serial(int32_t block) const {
    return block == BlockManager::kNone ? 0 : serials_.at(block);
  }

  std::list<int32_t> idle_;
  std::map<int32_t, int> references_;
  std::map<int32_t, int64_t> serials_;  // of cached blocks
  std::map<Key, int32_t> entries_;
  int64_t last_serial_ = 0;
};

/// Random sequences hold chains of blocks, as the scheduler's do.
class BlockManagerRun {
 public:
  BlockManagerRun(uint64_t seed, uint64_t hash_mask)
      : random_(seed),
        block_size_(1 << random_.below(5)),
        blocks_(random_.between(1, 64), block_size_, hash_mask),
        model_(blocks_.num_blocks()) {}

  void step() {
    switch (random_.below(8)) {
      case 0:
      case 1:
      case 2:
        return grow();
      case 3:
      case 4:
        return start();
      case 5:
        return drop();
      case 6:
        return random_.chance(0.1) ? forget() : grow();
      default:
        return random_.chance(0.01) ? reset() : grow();
    }
  }

  void compare() {
    Integrity::verify(blocks_);
    check(blocks_.num_idle() == model_.num_idle(), "{} idle, model {}", blocks_.num_idle(),
          model_.num_idle());
    check(blocks_.num_cached() == model_.num_cached(), "{} cached, model {}", blocks_.num_cached(),
          model_.num_cached());
    for (int32_t block = 0; block < blocks_.num_blocks(); ++block) {
      check(blocks_.ref_count(block) == model_.references(block), "block {}: references", block);
      check(blocks_.is_cached(block) == model_.is_cached(block), "block {}: cached", block);
    }
  }

 private:
  struct Chain : std::vector<int32_t> {
    std::string salt;
  };

  std::vector<int32_t> some_tokens() {  // few different ones: prefixes are shared often
    return std::vector<int32_t>(static_cast<size_t>(block_size_),
                                static_cast<int32_t>(random_.below(3)));
  }
  int32_t last(const Chain& chain) { return chain.empty() ? BlockManager::kNone : chain.back(); }

  int32_t find(int32_t parent, const std::vector<int32_t>& tokens, const std::string& salt) {
    const int32_t block = blocks_.find(parent, tokens, salt),
                  want = model_.find(parent, tokens, salt);
    check(block == want, "find under {}: {}, model {}", parent, block, want);
    return block;
  }
  void start() {  // a new sequence takes what it finds in the cache
    Chain chain;
    if (random_.chance(0.3)) chain.salt = random_.chance(0.5) ? "pepper" : "sugar";
    for (auto left = random_.below(6); left > 0; --left) {
      const int32_t block = find(last(chain), some_tokens(), chain.salt);
      if (block == BlockManager::kNone || std::ranges::count(chain, block) > 0) break;
      blocks_.add_ref(block);
      model_.add_ref(block);
      chain.push_back(block);
    }
    chains_.push_back(chain);
  }
  void grow() {  // a block more, published or not
    if (chains_.empty()) return start();
    Chain& chain = chains_[static_cast<size_t>(random_.below(std::ssize(chains_)))];
    const int32_t block = blocks_.allocate();
    check(block == model_.allocate(), "allocate gives {}", block);
    if (block == BlockManager::kNone) return drop();
    const auto tokens = some_tokens();
    if (random_.chance(0.8)) {
      const bool published = blocks_.publish(last(chain), block, tokens, chain.salt);
      check(published == model_.publish(last(chain), block, tokens, chain.salt), "publish: {}",
            published);
    }
    chain.push_back(block);
  }
  void drop() {
    if (chains_.empty()) return;
    const auto it = chains_.begin() + random_.below(std::ssize(chains_));
    while (!it->empty()) {
      blocks_.release(it->back());
      model_.release(it->back());
      it->pop_back();
    }
    chains_.erase(it);
  }
  void forget() {
    const auto block = static_cast<int32_t>(random_.below(blocks_.num_blocks()));
    blocks_.forget(block);
    model_.forget(block);
  }
  void reset() {
    blocks_.reset_prefix_cache();
    for (int32_t block = 0; block < blocks_.num_blocks(); ++block) model_.forget(block);
  }

  Random random_;
  int block_size_;
  BlockManager blocks_;
  BlockManagerModel model_;
  std::vector<Chain> chains_;
};

void run_block_manager(uint64_t hash_mask) {
  for (uint64_t seed = 0; seed < kNumSeeds; ++seed) {
    BlockManagerRun run(seed, hash_mask);
    ASSERT_NO_FATAL_FAILURE(run_operations(run, seed));
  }
}

TEST(EngineModel, BlockManagerDoesWhatTheObviousOneDoes) { run_block_manager(kWholeHash); }

TEST(EngineModel, BlockManagerDoesTheSameWhenHashesCollide) { run_block_manager(0xf); }

}  // namespace
}  // namespace nanovllm
