// Scheduler: decides what runs next. One token budget per step, shared by running decodes and by
// chunks of waiting prompts. Pure C++ on plain values: no device, no model, no clock, no thread.
//
// Order of service. Running sequences come first, oldest first: a decode takes one token of the
// budget, an unfinished prompt as many as are left. Then waiting sequences are admitted in order of
// arrival. Where blocks run out, the newest running sequence is preempted: its blocks are freed,
// and it waits at the front of the queue to be recomputed. So every running sequence arrived before
// every waiting one, the oldest always advances, and each request ends.
//
// With priorities (vLLM's: lower is earlier) "older" and "newest" are meant by rank: the order of
// arrival, each step of priority counting as kPriorityAge arrivals. A request ages as it waits: for
// each step that others are above it, kPriorityAge later ones overtake it at most. A waiting
// sequence may then be older than a running one.
//
// Admission takes the blocks of all known tokens at once, even if the prompt is computed in chunks,
// and leaves one idle block per running sequence: no sequence is admitted just to be preempted.
// With nothing running there is no such reserve: a request that refusal() lets pass fits.
//
// Prefix cache. A full block of known tokens is published when the step that computes it is
// planned, so that even a sequence admitted later in the same plan can use it. That is sound
// because steps run in the order of their plans, and because within a step each layer stores the
// keys and values of all rows before any row attends: the runner must keep to that. A plan that
// fails ends the engine. A sequence never takes all its tokens from the cache: at least the last
// one is computed, for its logits.
//
// Steps in flight. schedule() may be called again before the previous plan was processed (the next
// step is prepared while the current one runs): a sequence whose token is not read back yet is
// scheduled with `num_in_flight` = 1 and takes its input token from the device. Plans are processed
// in order. Blocks freed while a plan that may write them is in flight return to the pool when that
// plan is processed, not before; while blocks are on their way back no sequence is preempted for
// want of one: the sequence that needs it waits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "nanovllm/llm.h"

#include "engine/scheduler/block_manager.h"
#include "engine/scheduler/sequence.h"
#include "engine/scheduler/sequence_queue.h"

namespace nanovllm {

struct SchedulerConfig {
  int64_t max_num_seqs = 256;
  int64_t max_num_batched_tokens = 8192;
  int64_t max_model_len = 4096;
  int64_t num_blocks = 0;
  int block_size = 64;
  bool enable_prefix_caching = true;
  bool has_priorities = false;  // else all are equal
  int max_plans_in_flight = 2;
  uint64_t prefix_hash_mask = ~uint64_t{0};  // for tests: see BlockManager
};

/// One sequence's share of a step: the tokens at positions start .. start + num_tokens.
struct ScheduledSequence {
  Sequence* sequence = nullptr;
  int64_t start = 0;
  int64_t num_tokens = 0;
  // The last of these tokens is the last known one: the step samples the next.
  bool samples = false;
  // The (single) input token was sampled by a step in flight. With two plans in flight that is
  // always the step before this one.
  bool input_on_device = false;
  // The plan admits the sequence: others in the same plan may compute the keys that it shares.
  bool is_new = false;
  // The sequence's, when this was planned: a preemption since then voids the result.
  int64_t num_preemptions = 0;
  // Set by process(): the result was taken. The result of a sequence that ended or was preempted
  // since it was planned is dropped.
  bool counts = false;
};

/// The work of one step. Build its batch right away: tokens and block tables are read from the
/// sequences, which the next call of finish(), process() or schedule() may change. The sequences
/// themselves live until the plan is processed.
struct Plan {
  // Counts up from 1; 0 in an empty plan, which is not in flight and not to be processed.
  int64_t step = 0;
  std::vector<ScheduledSequence> sequences;        // oldest first
  int64_t num_tokens = 0, num_prefill_tokens = 0;  // prefill: prompts, and what is recomputed
  bool empty() const { return sequences.empty(); }
  /// Whether it samples for a sequence with a token mask: a grammar's, or allowed_token_ids.
  bool needs_masks() const {
    return std::ranges::any_of(sequences, [](const ScheduledSequence& s) {
      return s.samples && s.sequence->has_token_mask();
    });
  }
};

/// The present state, and counts since the start. prompt_tokens and cached_prompt_tokens count a
/// request when it is first admitted.
struct SchedulerStats {
  int64_t waiting = 0, running = 0, free_blocks = 0;
  int64_t waiting_tokens = 0;  // of the waiting sequences: prompts, and what is recomputed
  int64_t preemptions = 0, prompt_tokens = 0, cached_prompt_tokens = 0, generated_tokens = 0;
};

class Scheduler {
 public:
  static constexpr int64_t kPriorityAge = 64;
  explicit Scheduler(const SchedulerConfig& config);

  /// Why this request could never run (longer than max_model_len, or than the whole cache), or
  /// nothing. The longest state of a request is prompt + max_tokens - 1 positions.
  std::optional<std::string> refusal(int64_t num_prompt_tokens, int64_t max_tokens) const;
  /// Queues a new sequence (status waiting, token_ids = prompt) whose refusal() is empty. It must
  /// live until take_finished() has given it back.
  void add(Sequence& sequence);

  /// Makes `plan` the next step's; empty when there is nothing to do until a plan in flight is
  /// processed, or at all. Its memory is reused: a step of decodes allocates nothing.
  void schedule(Plan& plan);
  /// Takes a step's results: one token per plan.sequences entry that samples, in order; a token of
  /// -1 fails that sequence (its logits were not finite) and takes its blocks out of the prefix
  /// cache, and so does a token that the sequence's grammar does not allow. Appends tokens,
  /// advances matchers, ends sequences by EOS, stop tokens and length, publishes full blocks to the
  /// prefix cache. Throws Error(engine) if plans are processed out of order. Results for a sequence
  /// that ended or was preempted meanwhile are dropped.
  void process(Plan& plan, std::span<const int32_t> sampled);

  /// Ends a sequence from outside (abort, stop string, error). `detail` becomes its error, or its
  /// stop_reason if the reason is stop. False, and nothing is done, if it had ended.
  bool finish(Sequence& sequence, FinishReason reason, std::string detail = {});
  /// Gives back, once, the sequences that ended and are in no plan in flight.
  std::vector<Sequence*> take_finished();

  int64_t plans_in_flight() const { return last_planned_ - last_processed_; }
  SchedulerStats stats() const;
  /// Adds the state of every block, and the first `most` of the running and of the waiting
  /// sequences.
  void add_to(EngineSnapshot& snapshot, int64_t most) const;
  /// Forgets all cached prefixes; a sequence that uses such a block keeps it.
  void reset_prefix_cache() { blocks_.reset_prefix_cache(); }
  /// BlockManager's methods of the same names.
  void record_events() { blocks_.record_events(); }
  std::vector<BlockEvent> take_events() { return blocks_.take_events(); }
  const BlockManager& blocks() const { return blocks_; }

 private:
  friend class Integrity;  // the tests' check of all invariants
  // There is an idle block; one comes back with a plan in flight; the sequence itself had to go.
  enum class Room { yes, wait, no };

  void schedule_running(Plan& plan);
  void schedule_waiting(Plan& plan);
  Room make_room(Sequence& sequence);
  bool admit(Sequence& sequence);
  void plan_tokens(Plan& plan, Sequence& sequence, int64_t num_tokens, bool is_new);
  void preempt(Sequence& sequence);
  void append(Sequence& sequence, int32_t token);
  bool advance_matcher(Sequence& sequence, int32_t token);
  void end(Sequence& sequence, FinishReason reason, std::string detail);
  void publish_full_blocks(Sequence& sequence);
  void release_blocks(Sequence& sequence);
  void release_retired(int64_t step);
  std::span<const int32_t> block_tokens(const Sequence& sequence, int64_t index) const;
  int64_t blocks_for(int64_t num_tokens) const;
  bool is_in_flight(const Sequence& sequence) const { return sequence.last_step > last_processed_; }
  std::vector<int32_t>& retiring(int64_t step);

  SchedulerConfig config_;
  BlockManager blocks_;
  // In order of rank; without priorities all of the first before all of the second.
  SequenceQueue running_, waiting_;
  SequenceQueue finished_;  // ended and in no plan in flight: to be given back
  int64_t num_arrivals_ = 0;
  int64_t last_planned_ = 0, last_processed_ = 0;  // steps
  // Blocks whose last user ended while step s was in flight: at [s % max_plans_in_flight], until s
  // is processed.
  std::vector<std::vector<int32_t>> retiring_;
  int64_t num_retiring_ = 0;
  std::vector<int32_t> hits_;  // admit()'s, reused
  // The sequence that was last refused for want of blocks, and how many idle ones it needed: not
  // tried again with less.
  int64_t blocked_arrival_ = 0, blocked_needs_ = 0;
  SchedulerStats totals_;
};

}  // namespace nanovllm
