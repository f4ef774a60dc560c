#include "io/tokenizer/control_tokens.h"

#include <algorithm>

#include "io/tokenizer/state.h"
#include "io/utf8.h"

namespace nanovllm {

ControlTokens::ControlTokens(const Tokenizer& tokenizer) : state_(tokenizer.state_.get()) {
  std::vector<std::string_view> raw, normalized;
  for (const AddedToken& token : state_->added_tokens->tokens()) {
    if (!token.special) continue;
    raw.push_back(token.content);
    if (token.normalized && state_->normalizer) normalized.push_back(token.decoded);
  }
  any_normalized_ = !normalized.empty();
  raw_ = StringMatcher(raw);
  normalized_ = StringMatcher(normalized);
}

std::vector<size_t> ControlTokens::find(std::string_view text) const {
  auto [found, cut] = raw_.find_beginnings(text);
  // White space at the end is none: templates trim it.
  const size_t last = text.find_last_not_of(" \t\n\v\f\r");
  for (const size_t at : cut)
    if (last != text.npos && at <= last) found.push_back(at);
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  if (!any_normalized_) return found;

  MarkedText marked{std::string(text), ByteMarks(text.size())};
  for (const size_t at : found) marked.literal[at] = true;
  SearchBudget budget(text.size());
  state_->normalizer->normalize(marked, budget);
  const std::string_view bytes = marked.bytes;
  for (auto match = normalized_.find(bytes, 0); match;
       match = normalized_.find(bytes, match->span.begin + 1)) {
    if (marked.has_mark(match->span.begin, match->span.end)) continue;
    // Only its normal form is the token's: all of the text, for where that comes from is not known.
    found.clear();
    for (size_t at = 0; at < text.size(); at += decode_utf8(text.data() + at).length)
      found.push_back(at);
    break;
  }
  return found;
}

}  // namespace nanovllm
