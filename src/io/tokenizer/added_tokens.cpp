#include "io/tokenizer/added_tokens.h"

#include <algorithm>
#include <utility>

#include "io/utf8.h"

namespace nanovllm {

AddedTokens::AddedTokens(const std::vector<Entry>& entries, const Vocabulary& vocabulary,
                         const Normalizer* normalizer, const CategoryTable& categories)
    : categories_(categories) {
  Vocabulary seen;
  for (const Entry& entry : entries) add(entry, vocabulary, seen);
  for (AddedToken& token : tokens_) {
    token.decoded = token.content;
    if (!token.normalized || !normalizer) continue;
    try {
      token.decoded = normalizer->normalize(token.content);
    } catch (const Error& error) {
      fail(ErrorKind::model, "added token {}: {}", quote(token.content), error.what());
    }
  }
  for (const bool normalized : {false, true}) {
    Group& group = normalized ? normalized_ : raw_;
    std::vector<std::string_view> strings;
    for (size_t i = 0; i < tokens_.size(); ++i) {
      if (tokens_[i].normalized != normalized) continue;
      group.tokens.push_back(i);
      strings.push_back(tokens_[i].decoded);
    }
    group.matcher = StringMatcher(strings);
  }
}

void AddedTokens::add(const Entry& entry, const Vocabulary& vocabulary, Vocabulary& seen) {
  AddedToken token;
  token.id = static_cast<int32_t>(entry.required("id").integer(Vocabulary::kMaxId));
  token.content = entry.string("content");
  token.single_word = entry.flag("single_word", false);
  token.lstrip = entry.flag("lstrip", false);
  token.rstrip = entry.flag("rstrip", false);
  token.special = entry.flag("special", false);
  token.normalized = entry.flag("normalized", !token.special);
  if (token.content.empty()) return;  // matches nothing, as in the reference library
  const int32_t model_id = vocabulary.find(token.content);
  check(model_id == Vocabulary::kNone || model_id == token.id, ErrorKind::model,
        "{}: \"{}\" has id {} here and {} in model.vocab", entry.place(), token.content, token.id,
        model_id);
  check(model_id == token.id || !vocabulary.contains(token.id), ErrorKind::model,
        "{}: id {} of \"{}\" belongs to \"{}\" in model.vocab", entry.place(), token.id,
        token.content, vocabulary.text(token.id));
  check(!seen.contains(token.id), ErrorKind::model, "{}: id {} of \"{}\" is used twice",
        entry.place(), token.id, token.content);
  check(seen.add(token.content, token.id), ErrorKind::model, "{}: \"{}\" occurs twice",
        entry.place(), token.content);
  tokens_.push_back(std::move(token));
}

bool AddedTokens::stands_alone(std::string_view text, const Span& span) const {
  if (span.begin > 0) {
    size_t last = span.begin - 1;
    while (is_utf8_continuation(text[last])) --last;
    if (categories_.is_word(decode_utf8(text.data() + last).value)) return false;
  }
  return span.end == text.size() || !categories_.is_word(decode_utf8(text.data() + span.end).value);
}

size_t AddedTokens::spaces_before(std::string_view text, size_t begin, size_t limit) const {
  while (begin > limit) {
    size_t last = begin - 1;
    while (is_utf8_continuation(text[last])) --last;
    if (!categories_.is_white_space(decode_utf8(text.data() + last).value)) break;
    begin = last;
  }
  return begin;
}

size_t AddedTokens::spaces_after(std::string_view text, size_t end) const {
  while (end < text.size()) {
    const DecodedChar c = decode_utf8(text.data() + end);
    if (!categories_.is_white_space(c.value)) break;
    end += c.length;
  }
  return end;
}

void AddedTokens::split(const Group& group, std::string_view text, const ByteMarks& literal,
                        bool parse_special, std::vector<Part>& parts) const {
  size_t done = 0;        // the text before is in `parts`
  size_t spaces_end = 0;  // up to here white space has been looked through already
  for (size_t from = 0;;) {
    const auto match = group.tokens.empty() ? std::nullopt : group.matcher.find(text, from);
    if (!match) break;
    from = match->span.end;
    const AddedToken& token = tokens_[group.tokens[match->string]];
    if (token.special && !parse_special) continue;
    if (token.special && has_mark(literal, match->span.begin, match->span.end)) {
      from = match->span.begin + 1;  // a token that is not literal may begin inside
      continue;
    }
    if (token.single_word && !stands_alone(text, match->span)) continue;
    auto [begin, end] = match->span;
    if (token.lstrip) begin = spaces_before(text, begin, std::min(done, begin));
    if (token.rstrip) {
      // A token of white space may match again inside what an earlier one took.
      if (end < spaces_end)
        end = spaces_end;
      else
        end = spaces_end = spaces_after(text, end);
    }
    if (begin > done) parts.push_back({text.substr(done, begin - done), std::nullopt});
    parts.push_back({text.substr(begin, end - begin), token.id});
    done = end;
  }
  if (done < text.size()) parts.push_back({text.substr(done), std::nullopt});
}

}  // namespace nanovllm
