#include "engine/token_rules.h"

#include <algorithm>
#include <functional>

namespace nanovllm {
namespace {

/// The tokens that words are: as vLLM has it, also with a space before them, where that is as many
/// tokens and another first one.
std::vector<std::vector<int32_t>> tokens_of(const Tokenizer& tokenizer,
                                            const std::vector<std::string>& words) {
  std::vector<std::vector<int32_t>> list;
  for (const std::string& word : words) {
    const std::string bare = word.substr(std::min(word.find_first_not_of(' '), word.size()));
    const auto within = tokenizer.encode(bare, false), apart = tokenizer.encode(" " + bare, false);
    if (within.empty()) continue;
    list.push_back(within);
    if (apart.size() == within.size() && apart.front() != within.front()) list.push_back(apart);
  }
  return list;
}

}  // namespace

TokenRules token_rules(const SamplingParams& params, const Tokenizer* tokenizer,
                       int64_t vocab_size) {
  TokenRules rules;
  if (!params.allowed_token_ids.empty())
    rules.allowed_tokens.resize(static_cast<size_t>(vocab_size + 31) / 32);
  for (const int64_t id : params.allowed_token_ids)
    rules.allowed_tokens[static_cast<size_t>(id) / 32] |= 1u << id % 32;
  for (const auto& [id, bias] : params.logit_bias)
    rules.biases.push_back({static_cast<int32_t>(id), static_cast<float>(bias)});
  if (params.bad_words.empty()) return rules;
  for (auto& word : tokens_of(*tokenizer, params.bad_words))
    if (word.size() == 1)
      rules.biases.push_back({word[0], kMasked});
    else
      rules.bad_words.push_back(std::move(word));
  return rules;
}

Begun is_begun(const ScheduledSequence& s, std::span<const int32_t> word) {
  const Sequence& sequence = *s.sequence;
  const int64_t end = s.start + s.num_tokens, begin = end - std::ssize(word) + 1;
  if (begin < sequence.num_prompt_tokens) return Begun::no;
  const int64_t known = std::min(end, sequence.num_tokens());
  const auto text = std::span(sequence.token_ids)
                        .subspan(static_cast<size_t>(begin), static_cast<size_t>(known - begin));
  if (!std::ranges::equal(text, word.first(text.size()))) return Begun::no;
  return known < end ? Begun::unknown : Begun::yes;
}

bool is_below_min_tokens(const ScheduledSequence& s) {
  return s.samples && !s.sequence->matcher &&
         s.sequence->num_generated() + s.sequence->num_in_flight <= s.sequence->params.min_tokens;
}

void keep_allowed_tokens(const ScheduledSequence& scheduled, std::span<uint32_t> mask) {
  Sequence& s = *scheduled.sequence;
  if (const auto& allowed = s.rules.allowed_tokens; !allowed.empty())
    std::ranges::transform(mask, allowed, mask.begin(), std::bit_and());
  for_each_bias(scheduled, [mask](int32_t id, float bias, int32_t before) {
    if (bias == kMasked && before < 0) mask[static_cast<size_t>(id) / 32] &= ~(1u << id % 32);
  });
  if (s.matcher_error.empty() && std::ranges::none_of(mask, std::identity()))
    s.matcher_error = "the request's rules leave no token that may be sampled here";
}

}  // namespace nanovllm
