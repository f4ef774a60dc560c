#include "engine/scheduler/scheduler.h"

#include <algorithm>

#include "core/check.h"

namespace nanovllm {
namespace {

BlockState state_of(const BlockManager& blocks, int32_t block) {
  if (blocks.ref_count(block) == 0)
    return blocks.is_cached(block) ? BlockState::cached : BlockState::free;
  return blocks.is_cached(block) ? BlockState::used_and_cached : BlockState::used;
}

}  // namespace

Scheduler::Scheduler(const SchedulerConfig& config)
    : config_(config), blocks_(config.num_blocks, config.block_size, config.prefix_hash_mask) {
  const auto positive = [](int64_t value, const char* name) {
    check(value >= 1, ErrorKind::invalid_argument, "{} is {}: need at least 1", name, value);
  };
  positive(config.max_num_seqs, "max_num_seqs");
  positive(config.max_num_batched_tokens, "max_num_batched_tokens");
  positive(config.max_model_len, "max_model_len");
  positive(config.max_plans_in_flight, "max_plans_in_flight");
  retiring_.resize(static_cast<size_t>(config.max_plans_in_flight));
}

// -- Requests come and go.

int64_t Scheduler::blocks_for(int64_t num_tokens) const {
  return num_tokens / config_.block_size + (num_tokens % config_.block_size != 0);
}

std::optional<std::string> Scheduler::refusal(int64_t num_prompt_tokens, int64_t max_tokens) const {
  if (num_prompt_tokens < 1 || max_tokens < 1 ||
      max_tokens > config_.max_model_len - num_prompt_tokens)
    return fmt::format("prompt ({} tokens) and max_tokens {} do not fit max_model_len {}",
                       num_prompt_tokens, max_tokens, config_.max_model_len);
  const int64_t needed = blocks_for(num_prompt_tokens + max_tokens - 1);
  if (needed > blocks_.num_blocks())
    return fmt::format(
        "prompt ({} tokens) and max_tokens {} need {} KV blocks of {} tokens, the whole cache has "
        "{}: lower max_tokens, shorten the prompt or enlarge the cache",
        num_prompt_tokens, max_tokens, needed, config_.block_size, blocks_.num_blocks());
  return std::nullopt;
}

void Scheduler::add(Sequence& s) {
  check(s.status == SequenceStatus::waiting && s.num_prompt_tokens == s.num_tokens() &&
            s.arrival == 0,
        "request {} is not new", s.request_id);
  if (const auto reason = refusal(s.num_prompt_tokens, s.max_tokens)) {
    fail(ErrorKind::invalid_argument, "request {}: {}", s.request_id, *reason);
  }
  s.arrival = s.rank = ++num_arrivals_;
  if (config_.has_priorities) s.rank += kPriorityAge * s.params.priority;
  waiting_.insert(s);
  totals_.waiting_tokens += s.num_tokens();
}

bool Scheduler::finish(Sequence& sequence, FinishReason reason, std::string detail) {
  if (sequence.is_finished()) return false;
  end(sequence, reason, std::move(detail));
  return true;
}

std::vector<Sequence*> Scheduler::take_finished() {
  std::vector<Sequence*> taken;
  while (Sequence* sequence = finished_.front()) {
    finished_.remove(*sequence);
    taken.push_back(sequence);
  }
  return taken;
}

// -- Planning a step.

void Scheduler::schedule(Plan& plan) {
  plan.sequences.clear();
  plan.step = plan.num_tokens = plan.num_prefill_tokens = 0;
  if (plans_in_flight() == config_.max_plans_in_flight) return;
  plan.step = last_planned_ + 1;
  schedule_running(plan);
  schedule_waiting(plan);
  if (plan.empty())
    plan.step = 0;
  else
    last_planned_ = plan.step;
}

void Scheduler::schedule_running(Plan& plan) {
  for (Sequence* s = running_.front(); s; s = s->next) {
    const int64_t budget = config_.max_num_batched_tokens - plan.num_tokens;
    if (budget == 0) return;
    // All that it may generate is sampled or being sampled: it ends when that is read back.
    if (s->num_generated() + s->num_in_flight >= s->max_tokens) continue;
    const int64_t left = s->num_tokens() + s->num_in_flight - s->num_computed_tokens;
    const int64_t num_tokens = std::min(left, budget);
    // A prompt got its blocks when it was admitted; a decode alone can need one here, at most one.
    if (blocks_for(s->num_computed_tokens + num_tokens) > std::ssize(s->block_table)) {
      const Room room = make_room(*s);
      if (room == Room::no) return;  // it was the last one running
      if (room == Room::wait) continue;
      s->block_table.push_back(blocks_.allocate());
    }
    plan_tokens(plan, *s, num_tokens, false);
  }
}

void Scheduler::schedule_waiting(Plan& plan) {
  while (!waiting_.empty() && running_.size() < config_.max_num_seqs) {
    const int64_t budget = config_.max_num_batched_tokens - plan.num_tokens;
    Sequence& s = *waiting_.front();
    if (budget == 0 || !admit(s)) return;
    plan_tokens(plan, s, std::min(s.num_tokens() - s.num_computed_tokens, budget), true);
  }
}

// An idle block for a running sequence, at the cost of the newest. The victim is never part of the
// plan being made: it is the sequence itself or comes after it. So nothing of this plan is lost,
// and nothing is published that will not be computed.
Scheduler::Room Scheduler::make_room(Sequence& sequence) {
  while (blocks_.num_idle() == 0) {
    if (num_retiring_ > 0) return Room::wait;
    Sequence& newest = *running_.back();
    if (&newest == running_.front()) {  // refusal() should have kept it out
      newest.failure = RequestFailure::capacity;
      end(newest, FinishReason::error,
          fmt::format("the sequence has outgrown the whole KV cache of {} blocks of {} tokens",
                      blocks_.num_blocks(), config_.block_size));
      return Room::no;
    }
    preempt(newest);
    if (&newest == &sequence) return Room::no;
  }
  return Room::yes;
}

// Moves the first waiting sequence to the running ones, with blocks for all its tokens, as many as
// possible from the prefix cache. In a plan that preempted or left a sequence waiting for a block
// this fails by itself: then fewer blocks are idle than the first of the queue needs.
bool Scheduler::admit(Sequence& s) {
  const int64_t idle = blocks_.num_idle() - running_.size();
  if (s.arrival == blocked_arrival_ && idle < blocked_needs_ && !running_.empty()) return false;

  // At least the last token is computed, and sharing is by whole blocks.
  const int64_t num_blocks = blocks_for(s.num_tokens());
  const int64_t max_hits = config_.enable_prefix_caching && s.wants_cache_hits()
                               ? (s.num_tokens() - 1) / config_.block_size
                               : 0;
  hits_.clear();
  int64_t needed = num_blocks;  // idle blocks
  int32_t parent = BlockManager::kNone;
  for (int64_t i = 0; i < max_hits; ++i) {
    parent = blocks_.find(parent, block_tokens(s, i), s.params.cache_salt);
    if (parent == BlockManager::kNone) break;
    hits_.push_back(parent);
    if (blocks_.ref_count(parent) > 0) --needed;
  }
  if (idle < needed) {
    blocked_arrival_ = s.arrival;
    blocked_needs_ = needed;
    return false;
  }

  for (const int32_t block : hits_) blocks_.add_ref(block);
  s.block_table.assign(hits_.begin(), hits_.end());
  while (std::ssize(s.block_table) < num_blocks) s.block_table.push_back(blocks_.allocate());
  s.num_offered_blocks = std::ssize(hits_);
  s.num_computed_tokens = s.num_offered_blocks * config_.block_size;
  if (s.num_preemptions == 0) {
    // Its longest state, so that no later step allocates.
    s.token_ids.reserve(static_cast<size_t>(s.num_prompt_tokens + s.max_tokens));
    s.block_table.reserve(static_cast<size_t>(blocks_for(s.num_prompt_tokens + s.max_tokens - 1)));
    s.num_cached_tokens = s.num_computed_tokens;
    totals_.prompt_tokens += s.num_prompt_tokens;
    totals_.cached_prompt_tokens += s.num_cached_tokens;
  }
  waiting_.remove(s);
  totals_.waiting_tokens -= s.num_tokens();
  running_.insert(s);
  s.status = SequenceStatus::running;
  return true;
}

void Scheduler::plan_tokens(Plan& plan, Sequence& s, int64_t num_tokens, bool is_new) {
  const int64_t start = s.num_computed_tokens;
  const bool samples = start + num_tokens == s.num_tokens() + s.num_in_flight;
  plan.sequences.push_back({.sequence = &s,
                            .start = start,
                            .num_tokens = num_tokens,
                            .samples = samples,
                            .input_on_device = start >= s.num_tokens(),
                            .is_new = is_new,
                            .num_preemptions = s.num_preemptions});
  plan.num_tokens += num_tokens;
  const bool decode = num_tokens == 1 && start >= s.num_prompt_tokens;
  if (!decode) plan.num_prefill_tokens += num_tokens;
  s.num_computed_tokens += num_tokens;
  s.num_in_flight += samples;
  s.last_step = plan.step;
  s.num_scheduled_tokens = num_tokens;
  publish_full_blocks(s);
}

void Scheduler::preempt(Sequence& s) {
  release_blocks(s);
  s.num_computed_tokens = s.num_in_flight = 0;
  ++s.num_preemptions;
  ++totals_.preemptions;
  running_.remove(s);
  waiting_.insert(s);
  totals_.waiting_tokens += s.num_tokens();
  s.status = SequenceStatus::waiting;
}

// -- Taking results.

void Scheduler::process(Plan& plan, std::span<const int32_t> sampled) {
  check(plan.step == last_processed_ + 1 && plan.step <= last_planned_,
        "plan {} is processed after {}, with {} planned", plan.step, last_processed_,
        last_planned_);
  const auto num_samples = std::ranges::count(plan.sequences, true, &ScheduledSequence::samples);
  check(num_samples == std::ssize(sampled), "plan {}: {} tokens for {} sampling sequences",
        plan.step, sampled.size(), num_samples);
  last_processed_ = plan.step;
  release_retired(plan.step);

  size_t next = 0;
  for (ScheduledSequence& entry : plan.sequences) {
    Sequence& s = *entry.sequence;
    const int32_t token = entry.samples ? sampled[next++] : 0;
    entry.counts = !s.is_finished() && entry.num_preemptions == s.num_preemptions;
    if (s.is_finished()) {
      if (!is_in_flight(s)) finished_.push_back(s);
    } else if (entry.samples && entry.counts) {
      --s.num_in_flight;
      append(s, token);
    }
  }
}

void Scheduler::append(Sequence& s, int32_t token) {
  if (token < 0 && s.matcher_error.empty()) {  // its cache may be as broken as its logits
    for (const int32_t block : s.block_table) blocks_.forget(block);
    blocks_.forget_orphans();
    s.failure = RequestFailure::not_finite;
    return end(s, FinishReason::error, "the model's logits were not finite");
  }
  if (!advance_matcher(s, token)) return end(s, FinishReason::error, std::move(s.matcher_error));
  s.token_ids.push_back(token);
  ++totals_.generated_tokens;
  publish_full_blocks(s);
  // A grammar's masks have a stop token only where the text ends: nothing else can follow.
  const bool is_stop = (s.matcher || s.num_generated() >= s.params.min_tokens) &&
                       std::ranges::count(s.stop_token_ids, token) > 0,
             named = is_stop && std::ranges::count(s.params.stop_token_ids, token) > 0;
  if (named || (is_stop && (s.matcher || !s.params.ignore_eos))) {
    end(s, FinishReason::stop, named ? std::to_string(token) : std::string());
  } else if (s.num_generated() >= s.max_tokens) {
    end(s, FinishReason::length, {});
  }
}

// A matcher is a module's: its faults cost its own sequence alone.
bool Scheduler::advance_matcher(Sequence& s, int32_t token) {
  if (!s.matcher) return s.matcher_error.empty();
  try {
    if (s.matcher_error.empty() && !s.matcher->accept(token))
      s.matcher_error = fmt::format("the grammar does not allow token {} here", token);
  } catch (const std::exception& error) {
    s.matcher_error = fmt::format("the grammar cannot go on: {}", error.what());
  }
  return s.matcher_error.empty();
}

void Scheduler::end(Sequence& s, FinishReason reason, std::string detail) {
  const bool waits = s.status == SequenceStatus::waiting;
  (waits ? waiting_ : running_).remove(s);
  if (waits) totals_.waiting_tokens -= s.num_tokens();
  release_blocks(s);
  s.num_in_flight = 0;
  s.num_computed_tokens = std::min(s.num_computed_tokens, s.num_tokens());
  s.status = SequenceStatus::finished;
  s.finish_reason = reason;
  if (reason == FinishReason::error)
    s.error = std::move(detail);
  else if (reason == FinishReason::stop)
    s.stop_reason = std::move(detail);
  if (!is_in_flight(s)) finished_.push_back(s);
}

// -- Blocks.

std::span<const int32_t> Scheduler::block_tokens(const Sequence& s, int64_t index) const {
  const auto size = static_cast<size_t>(config_.block_size);
  return std::span(s.token_ids).subspan(static_cast<size_t>(index) * size, size);
}

// A sequence publishes a block only under the one before it in its own table, which it holds:
// whoever holds an entry holds all those it depends on, so that they are evicted leaf first. Where
// an equal entry exists already, this sequence's block stays private, and so do those after it.
void Scheduler::publish_full_blocks(Sequence& s) {
  if (!config_.enable_prefix_caching) return;
  const int64_t known = std::min(s.num_computed_tokens, s.num_tokens());
  for (; (s.num_offered_blocks + 1) * config_.block_size <= known; ++s.num_offered_blocks) {
    const auto index = static_cast<size_t>(s.num_offered_blocks);
    const int32_t parent = index == 0 ? BlockManager::kNone : s.block_table[index - 1];
    blocks_.publish(parent, s.block_table[index], block_tokens(s, s.num_offered_blocks),
                    s.params.cache_salt);
  }
}

std::vector<int32_t>& Scheduler::retiring(int64_t step) {
  return retiring_[static_cast<size_t>(step % config_.max_plans_in_flight)];
}

// Last to first, so that a block is evicted before the one it depends on.
void Scheduler::release_blocks(Sequence& s) {
  if (is_in_flight(s)) {
    auto& blocks = retiring(s.last_step);
    blocks.insert(blocks.end(), s.block_table.rbegin(), s.block_table.rend());
    num_retiring_ += std::ssize(s.block_table);
  } else {
    std::for_each(s.block_table.rbegin(), s.block_table.rend(),
                  [this](int32_t block) { blocks_.release(block); });
  }
  s.block_table.clear();
  s.num_offered_blocks = 0;
}

void Scheduler::release_retired(int64_t step) {
  auto& blocks = retiring(step);
  for (const int32_t block : blocks) blocks_.release(block);
  num_retiring_ -= std::ssize(blocks);
  blocks.clear();
}

// -- Looking in.

SchedulerStats Scheduler::stats() const {
  SchedulerStats stats = totals_;
  stats.waiting = waiting_.size();
  stats.running = running_.size();
  stats.free_blocks = blocks_.num_idle();
  return stats;
}

void Scheduler::add_to(EngineSnapshot& snapshot, int64_t most) const {
  snapshot.blocks.resize(static_cast<size_t>(blocks_.num_blocks()));
  for (int32_t block = 0; block < blocks_.num_blocks(); ++block)
    snapshot.blocks[static_cast<size_t>(block)] = state_of(blocks_, block);
  const auto add = [&](const SequenceQueue& queue, std::vector<SequenceSnapshot>& into) {
    for (const Sequence* s = queue.front(); s && std::ssize(into) < most; s = s->next)
      into.push_back(
          {.arrival = s->arrival,
           .num_prompt_tokens = s->num_prompt_tokens,
           .num_generated = s->num_generated(),
           .max_tokens = s->max_tokens,
           .num_computed_tokens = s->num_computed_tokens,
           .num_cached_tokens = s->num_cached_tokens,
           .num_scheduled_tokens = s->last_step == last_planned_ ? s->num_scheduled_tokens : 0,
           .num_preemptions = s->num_preemptions,
           .block_table = s->block_table});
  };
  add(running_, snapshot.running);
  add(waiting_, snapshot.waiting);
}

}  // namespace nanovllm
