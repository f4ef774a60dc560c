// A request's rules about single tokens: logit_bias, bad_words, allowed_token_ids, and stop
// tokens that min_tokens keeps away. Read from its parameters once; each step asks what of it
// holds.
#pragma once

#include <limits>
#include <span>

#include "nanovllm/tokenizer.h"

#include "engine/scheduler/scheduler.h"

namespace nanovllm {

/// `tokenizer` may be null without bad_words.
TokenRules token_rules(const SamplingParams& params, const Tokenizer* tokenizer,
                       int64_t vocab_size);

/// Whether the answer of `s` ends in all tokens of `word` but its last. unknown: it does
/// if the token that only the device knows so far is the last but one.
enum class Begun { no, yes, unknown };
Begun is_begun(const ScheduledSequence& s, std::span<const int32_t> word);
/// Whether a stop token may not be its next (in flight, too): min_tokens come first. No grammar's.
bool is_below_min_tokens(const ScheduledSequence& s);

constexpr float kMasked = -std::numeric_limits<float>::infinity();

/// Calls put(token id, bias, the token that must come before or -1) for each bias of the logits
/// that `s` samples from.
template <class Put>
void for_each_bias(const ScheduledSequence& s, Put&& put) {
  if (!s.samples) return;
  for (const TokenBias& bias : s.sequence->rules.biases) put(bias.token_id, bias.bias, -1);
  for (const auto& word : s.sequence->rules.bad_words)
    if (const Begun begun = is_begun(s, word); begun != Begun::no)
      put(word.back(), kMasked, begun == Begun::unknown ? word[word.size() - 2] : -1);
  if (!is_below_min_tokens(s)) return;
  for (const int32_t id : s.sequence->stop_token_ids) put(id, kMasked, -1);
}

/// Takes the tokens from the mask that the request does not allow, whatever its grammar says. A
/// sequence that has none left fails, as one whose grammar cannot go on does.
void keep_allowed_tokens(const ScheduledSequence& scheduled, std::span<uint32_t> mask);

}  // namespace nanovllm
