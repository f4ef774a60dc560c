// Integrity: every invariant of block manager and scheduler, recomputed from scratch. A test calls
// it after each step.
#pragma once

#include <algorithm>
#include <vector>

#include "core/check.h"
#include "engine/scheduler/scheduler.h"

namespace nanovllm {

class Integrity {
 public:
  /// Throws Error(engine) if an invariant is broken. O(everything).
  static void verify(const BlockManager& blocks);
  static void verify(const Scheduler& scheduler);

 private:
  static void verify(const Scheduler& scheduler, const Sequence& s);
};

inline void Integrity::verify(const BlockManager& blocks) {
  constexpr int32_t kNone = BlockManager::kNone;
  std::vector<bool> idle(blocks.blocks_.size());
  int64_t num_idle = 0, num_cached = 0;
  bool seen_cached = false;
  for (int32_t block = blocks.idle_front_, previous = kNone; block != kNone;
       previous = block, block = blocks.at(block).next) {
    const BlockManager::Block& b = blocks.at(block);
    check(b.previous == previous, "idle list: broken link at KV block {}", block);
    check(b.ref_count == 0, "KV block {} is idle with {} references", block, b.ref_count);
    check(b.cached || !seen_cached, "KV block {}: free, but behind cached ones", block);
    seen_cached |= b.cached;
    const auto index = static_cast<size_t>(block);
    check(!idle[index], "KV block {} is in the idle list twice", block);
    idle[index] = true;
    ++num_idle;
    // Leaf first: a parent that is idle too stands behind its children.
    check(!b.cached || b.parent == kNone || blocks.generation(b.parent) != b.parent_generation ||
              !idle[static_cast<size_t>(b.parent)],
          "KV block {} would be evicted before its child {}", b.parent, block);
  }
  check(num_idle == blocks.num_idle_, "{} idle KV blocks, {} counted", num_idle, blocks.num_idle_);
  for (int32_t block = 0; block < blocks.num_blocks(); ++block) {
    const BlockManager::Block& b = blocks.at(block);
    check(idle[static_cast<size_t>(block)] == (b.ref_count == 0), "KV block {}: {} references, {}",
          block, b.ref_count, b.ref_count == 0 ? "but not idle" : "but idle");
    if (!b.cached) continue;
    ++num_cached;
    const bool reachable =
        b.parent == kNone ||
        (blocks.at(b.parent).cached && blocks.generation(b.parent) == b.parent_generation);
    if (reachable) {
      check(blocks.find(b.parent, blocks.tokens_of(block), blocks.salt_of(block)) == block,
            "KV block {}: its entry is not found", block);
    }
  }
  for (const auto& [block, salt] : blocks.salts_)
    check(blocks.at(block).cached && blocks.at(block).parent == kNone, "KV block {} has a salt",
          block);
  check(num_cached == blocks.num_cached_, "{} cached KV blocks, {} counted", num_cached,
        blocks.num_cached_);
  int64_t in_buckets = 0;
  for (int32_t head : blocks.buckets_) {
    for (int32_t block = head; block != kNone && in_buckets <= num_cached;
         block = blocks.at(block).next_in_bucket) {
      check(blocks.at(block).cached, "KV block {} is in the index but not cached", block);
      ++in_buckets;
    }
  }
  check(in_buckets == num_cached, "{} entries in the index, {} cached", in_buckets, num_cached);
}

inline void Integrity::verify(const Scheduler& scheduler, const Sequence& s) {
  const int64_t id = s.request_id, known = s.num_tokens() + s.num_in_flight;
  check(s.num_in_flight >= 0 && s.num_in_flight <= scheduler.plans_in_flight() &&
            s.num_computed_tokens <= known,
        "request {}: {} computed, {} known, {} in flight", id, s.num_computed_tokens,
        s.num_tokens(), s.num_in_flight);
  if (s.status != SequenceStatus::running) {
    check(s.block_table.empty() && s.num_in_flight == 0, "request {} holds blocks", id);
    check(s.is_finished() || s.num_computed_tokens == 0, "request {} waits with tokens", id);
    return;
  }
  const int64_t num_blocks = std::ssize(s.block_table);
  check(num_blocks >= scheduler.blocks_for(s.num_computed_tokens) &&
            num_blocks <= scheduler.blocks_for(known),
        "request {}: {} blocks for {} computed of {} tokens", id, num_blocks, s.num_computed_tokens,
        known);
  check(s.num_generated() < s.max_tokens, "request {} runs past max_tokens", id);
  auto table = s.block_table;
  std::ranges::sort(table);
  check(std::ranges::adjacent_find(table) == table.end(), "request {}: a block twice", id);
  // A block that may still be written belongs to no other sequence.
  for (auto i = static_cast<size_t>(s.num_computed_tokens / scheduler.config_.block_size);
       i < s.block_table.size(); ++i) {
    check(scheduler.blocks_.ref_count(s.block_table[i]) == 1,
          "request {}: shares a block it writes", id);
  }
}

inline void Integrity::verify(const Scheduler& scheduler) {
  verify(scheduler.blocks_);
  std::vector<int32_t> references(static_cast<size_t>(scheduler.blocks_.num_blocks()));
  for (const SequenceQueue* queue :
       {&scheduler.running_, &scheduler.waiting_, &scheduler.finished_}) {
    for (const Sequence* s = queue->front(); s; s = s->next) {
      verify(scheduler, *s);
      for (const int32_t block : s->block_table) ++references[static_cast<size_t>(block)];
    }
  }
  int64_t num_retiring = 0;
  for (const auto& blocks : scheduler.retiring_) {
    for (const int32_t block : blocks) ++references[static_cast<size_t>(block)];
    num_retiring += std::ssize(blocks);
  }
  check(num_retiring == scheduler.num_retiring_, "{} retiring blocks, {} counted", num_retiring,
        scheduler.num_retiring_);
  for (int32_t block = 0; block < scheduler.blocks_.num_blocks(); ++block) {
    check(scheduler.blocks_.ref_count(block) == references[static_cast<size_t>(block)],
          "KV block {}: {} references counted, {} held", block, scheduler.blocks_.ref_count(block),
          references[static_cast<size_t>(block)]);
  }
  int64_t waiting_tokens = 0;
  for (const Sequence* s = scheduler.waiting_.front(); s; s = s->next)
    waiting_tokens += s->num_tokens();
  check(waiting_tokens == scheduler.totals_.waiting_tokens, "{} tokens wait, {} counted",
        waiting_tokens, scheduler.totals_.waiting_tokens);
  const Sequence* previous = nullptr;
  const auto check_queue = [&](const SequenceQueue& queue, SequenceStatus status) {
    int64_t size = 0;
    for (const Sequence* s = queue.front(); s; s = s->next, ++size) {
      check(s->status == status && !(s->is_finished() && scheduler.is_in_flight(*s)),
            "request {} is in the wrong queue", s->request_id);
      check(status == SequenceStatus::finished || !previous || previous->is_before(*s),
            "request {} overtook an older one", s->request_id);
      previous = s;
    }
    if (scheduler.config_.has_priorities) previous = nullptr;
    check(size == queue.size(), "a queue has {} sequences, {} counted", size, queue.size());
  };
  check_queue(scheduler.running_, SequenceStatus::running);
  check_queue(scheduler.waiting_, SequenceStatus::waiting);
  check_queue(scheduler.finished_, SequenceStatus::finished);
  check(scheduler.running_.size() <= scheduler.config_.max_num_seqs, "{} sequences run",
        scheduler.running_.size());
  check(scheduler.plans_in_flight() >= 0 &&
            scheduler.plans_in_flight() <= scheduler.config_.max_plans_in_flight,
        "{} plans in flight", scheduler.plans_in_flight());
}

}  // namespace nanovllm
