// Scheduler: decides what runs next. One token budget per step, shared by running decodes and by chunks of waiting prompts.
// Pure C++ on plain values: no device, no model, no clock, no thread.
//
// Order of service. Running sequences come first, oldest first: a decode takes one token of the budget, an unfinished prompt as many
// as are left. Then waiting sequences are admitted in order of arrival. Where blocks run out, the newest running sequence is preempted:
// its blocks are freed, and it waits at the front of the queue to be recomputed.
//
// Steps in flight. schedule() may be called again before the previous plan was processed (the next step is prepared while
// the current one runs): a sequence whose token is not read back yet is scheduled with `num_in_flight` = 1 and takes its input
// token from the device. Plans are processed in order. Blocks freed while a plan that may write them is in flight return to the pool
// when that plan is processed, not before.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/block_manager.h"
#include "engine/sequence.h"

namespace nanovllm {

struct SchedulerConfig {
  int64_t max_num_seqs = 256;
  int64_t max_num_batched_tokens = 8192;
  int64_t max_model_len = 4096;
  int64_t num_blocks = 0;
  int block_size = 64;
  bool enable_prefix_caching = true;
};

/// One sequence's share of a step: the tokens at positions start .. start + num_tokens.
struct ScheduledSequence {
  Sequence* sequence = nullptr;
  int64_t start = 0;
  int64_t num_tokens = 0;
  bool samples = false;            // the last of these tokens is the last known one: the step samples the next
  bool input_on_device = false;    // the (single) input token was sampled by a step in flight
};

struct Plan {
  int64_t step = 0;  // counts up from 1
  std::vector<ScheduledSequence> sequences;
  int64_t num_tokens = 0, num_prefill_tokens = 0;
  bool empty() const { return sequences.empty(); }
};

struct SchedulerStats {
  int64_t waiting = 0, running = 0, free_blocks = 0, preemptions = 0, prompt_tokens = 0, cached_prompt_tokens = 0,
          generated_tokens = 0;
};

class Scheduler {
 public:
  explicit Scheduler(const SchedulerConfig& config);

  /// Why this request could never run (longer than max_model_len, or than the whole cache), or nothing. The longest state of
  /// a request is prompt + max_tokens - 1 positions.
  std::optional<std::string> refusal(int64_t num_prompt_tokens, int64_t max_tokens) const;
  /// Takes a sequence (status waiting, token_ids = prompt). Its request_id must be new; refusal() must be empty.
  Sequence& add(std::unique_ptr<Sequence> sequence);

  /// The next step's plan; empty when there is nothing to do until a plan in flight is processed, or at all.
  Plan schedule();
  /// Takes a step's results: one token per plan.sequences entry that samples, in order; a token of -1 fails that sequence (its
  /// logits were not finite). Appends tokens, ends sequences by EOS, stop tokens and length, publishes full blocks to the prefix cache.
  /// Results for a sequence that ended or was preempted meanwhile are dropped.
  void process(const Plan& plan, std::span<const int32_t> sampled);

  /// Ends a sequence from outside (abort, stop string, error). Idempotent; an unknown id is ignored. False if it was not live.
  bool finish(int64_t request_id, FinishReason reason, std::string detail = {});
  /// Gives out, once, the sequences that ended and are in no plan in flight.
  std::vector<std::unique_ptr<Sequence>> take_finished();

  Sequence* find(int64_t request_id);
  bool has_unfinished() const;   // waiting or running sequences
  int64_t plans_in_flight() const;
  SchedulerStats stats() const;
  void reset_prefix_cache();
  const BlockManager& blocks() const;
  /// Throws Error(engine) if any invariant of scheduler and block manager is broken. For tests: O(everything).
  void check_integrity() const;

 private:
  // (the implementer's)
};

}  // namespace nanovllm
