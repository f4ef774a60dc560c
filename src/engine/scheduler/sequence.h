// Sequence: one answer of a request on its way through the engine. Plain data; its request owns it,
// and the Scheduler changes it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "nanovllm/params.h"

#include "constrain/grammar.h"

namespace nanovllm {

enum class SequenceStatus { waiting, running, finished };

struct Request;

/// A number that is added to a token's logit.
struct TokenBias {
  int32_t token_id = 0;
  float bias = 0;
};

/// A request's rules about single tokens, read from its parameters once (engine/token_rules.h).
struct TokenRules {
  std::vector<TokenBias> biases;                // logit_bias, and -inf for bad words of one token
  std::vector<std::vector<int32_t>> bad_words;  // of several tokens
  std::vector<uint32_t> allowed_tokens;         // bits of allowed_token_ids; empty: all
};

struct Sequence {
  Request* request = nullptr;  // null in tests of the scheduler alone
  int64_t request_id = 0;      // for messages
  int index = 0;               // of the request's answers
  SamplingParams params;
  uint64_t seed = 0;  // params.seed, or drawn by the engine
  // EOS and params.stop_token_ids: any of them ends the sequence, but for EOS with ignore_eos.
  std::vector<int32_t> stop_token_ids;
  TokenRules rules;
  // Where it stands in its grammar, after the tokens that were read back; null: none.
  std::unique_ptr<TokenMatcher> matcher{};
  std::string matcher_error;  // why there is no mask for the token in flight: it fails the sequence
  int64_t max_tokens = 0;     // params.max_tokens, cut so that prompt + output fit max_model_len

  std::vector<int32_t> token_ids;  // the prompt, then what was generated and read back
  int64_t num_prompt_tokens = 0;

  // -- Where the sequence stands. Always num_computed_tokens <= num_tokens() + num_in_flight: equal
  // but for one token where a step that samples is planned. With steps in flight
  // num_computed_tokens may pass num_tokens().

  // Keys and values of these are in the cache, or will be once the steps in flight have run.
  int64_t num_computed_tokens = 0;
  // Tokens sampled by steps that are not processed yet: known to the device only.
  int64_t num_in_flight = 0;
  // Prompt tokens taken from the prefix cache when the sequence was first scheduled.
  int64_t num_cached_tokens = 0;
  int64_t num_preemptions = 0;

  std::vector<int32_t> block_table;  // physical block of every block_size positions
  SequenceStatus status = SequenceStatus::waiting;
  FinishReason finish_reason = FinishReason::none;
  std::string stop_reason, error;
  RequestFailure failure = RequestFailure::none;

  // The row of the newest step that sampled for this sequence: where the next step finds its input
  // token on the device.
  int32_t sample_row = -1;

  // -- The scheduler's own.
  int64_t arrival = 0;    // order of add()
  int64_t rank = 0;       // the lower one is served first: arrival, moved by the priority
  int64_t last_step = 0;  // the newest plan that this sequence is part of
  int64_t num_scheduled_tokens = 0;  // its tokens in that plan
  // Leading blocks that came from the prefix cache or were offered to it.
  int64_t num_offered_blocks = 0;
  Sequence* previous = nullptr;  // in the queue (SequenceQueue) it is in
  Sequence* next = nullptr;

  int64_t num_tokens() const { return static_cast<int64_t>(token_ids.size()); }
  int64_t num_generated() const { return num_tokens() - num_prompt_tokens; }
  bool is_finished() const { return status == SequenceStatus::finished; }
  bool is_before(const Sequence& other) const {
    return std::pair(rank, arrival) < std::pair(other.rank, other.arrival);
  }
  bool has_token_mask() const { return matcher || !rules.allowed_tokens.empty(); }
  bool wants_cache_hits() const { return !params.prompt_logprobs.has_value(); }
};

}  // namespace nanovllm
