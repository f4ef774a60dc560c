#include "io/tokenizer/replace.h"

namespace nanovllm {

std::unique_ptr<Pattern> make_pattern(const Entry& entry, const CategoryTable& categories) {
  const Entry pattern = entry.required("pattern");
  if (const auto literal = pattern.member("String"))
    return make_literal_pattern(literal->string(), literal->place());
  return make_regex_pattern(pattern.string("Regex"), categories, pattern.place_of("Regex"));
}

Replacement::Replacement(const Entry& entry, const CategoryTable& categories)
    : pattern_(make_pattern(entry, categories)), content_(entry.string("content")) {}

std::string Replacement::apply(std::string text) const {
  std::vector<Span> matches;
  pattern_->find_all(text, matches);
  if (matches.empty()) return text;
  std::string out;
  out.reserve(text.size());
  size_t at = 0;
  for (const Span& match : matches) {
    out.append(text, at, match.begin - at).append(content_);
    at = match.end;
  }
  return out.append(text, at);
}

}  // namespace nanovllm
