// Scheduler::check_integrity: every invariant of scheduler and block manager, recomputed from
// scratch. For tests.
#include <algorithm>

#include "core/check.h"
#include "engine/scheduler/scheduler.h"

namespace nanovllm {

void Scheduler::check_sequence(const Sequence& s) const {
  const int64_t id = s.request_id, known = s.num_tokens() + s.num_in_flight;
  check(s.num_in_flight >= 0 && s.num_in_flight <= plans_in_flight() &&
            s.num_computed_tokens <= known,
        "request {}: {} computed, {} known, {} in flight", id, s.num_computed_tokens,
        s.num_tokens(), s.num_in_flight);
  if (s.status != SequenceStatus::running) {
    check(s.block_table.empty() && s.num_in_flight == 0, "request {} holds blocks", id);
    check(s.is_finished() || s.num_computed_tokens == 0, "request {} waits with tokens", id);
    return;
  }
  const int64_t num_blocks = std::ssize(s.block_table);
  check(num_blocks >= blocks_for(s.num_computed_tokens) && num_blocks <= blocks_for(known),
        "request {}: {} blocks for {} computed of {} tokens", id, num_blocks, s.num_computed_tokens,
        known);
  check(s.num_generated() < s.max_tokens, "request {} runs past max_tokens", id);
  auto table = s.block_table;
  std::ranges::sort(table);
  check(std::ranges::adjacent_find(table) == table.end(), "request {}: a block twice", id);
  // A block that may still be written belongs to no other sequence.
  for (auto i = static_cast<size_t>(s.num_computed_tokens / config_.block_size);
       i < s.block_table.size(); ++i) {
    check(blocks_.ref_count(s.block_table[i]) == 1, "request {}: shares a block it writes", id);
  }
}

void Scheduler::check_integrity() const {
  blocks_.check_integrity();
  std::vector<int32_t> references(static_cast<size_t>(blocks_.num_blocks()));
  for (const SequenceQueue* queue : {&running_, &waiting_, &finished_}) {
    for (const Sequence* s = queue->front(); s; s = s->next) {
      check_sequence(*s);
      for (const int32_t block : s->block_table) ++references[static_cast<size_t>(block)];
    }
  }
  int64_t num_retiring = 0;
  for (const auto& blocks : retiring_) {
    for (const int32_t block : blocks) ++references[static_cast<size_t>(block)];
    num_retiring += std::ssize(blocks);
  }
  check(num_retiring == num_retiring_, "{} retiring blocks, {} counted", num_retiring,
        num_retiring_);
  for (int32_t block = 0; block < blocks_.num_blocks(); ++block) {
    check(blocks_.ref_count(block) == references[static_cast<size_t>(block)],
          "KV block {}: {} references counted, {} held", block, blocks_.ref_count(block),
          references[static_cast<size_t>(block)]);
  }
  int64_t waiting_tokens = 0;
  for (const Sequence* s = waiting_.front(); s; s = s->next) waiting_tokens += s->num_tokens();
  check(waiting_tokens == totals_.waiting_tokens, "{} tokens wait, {} counted", waiting_tokens,
        totals_.waiting_tokens);
  const Sequence* previous = nullptr;
  const auto check_queue = [&](const SequenceQueue& queue, SequenceStatus status) {
    int64_t size = 0;
    for (const Sequence* s = queue.front(); s; s = s->next, ++size) {
      check(s->status == status && !(s->is_finished() && is_in_flight(*s)),
            "request {} is in the wrong queue", s->request_id);
      check(status == SequenceStatus::finished || !previous || previous->is_before(*s),
            "request {} overtook an older one", s->request_id);
      previous = s;
    }
    if (config_.has_priorities) previous = nullptr;
    check(size == queue.size(), "a queue has {} sequences, {} counted", size, queue.size());
  };
  check_queue(running_, SequenceStatus::running);
  check_queue(waiting_, SequenceStatus::waiting);
  check_queue(finished_, SequenceStatus::finished);
  check(running_.size() <= config_.max_num_seqs, "{} sequences run", running_.size());
  check(plans_in_flight() >= 0 && plans_in_flight() <= config_.max_plans_in_flight,
        "{} plans in flight", plans_in_flight());
}

}  // namespace nanovllm
