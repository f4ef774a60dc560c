#include "io/tokenizer/stages/replace.h"

#include <algorithm>

namespace nanovllm {

std::unique_ptr<Pattern> make_pattern(const Entry& entry, const CategoryTable& categories) {
  const Entry pattern = entry.required("pattern");
  if (const auto literal = pattern.member("String"))
    return make_literal_pattern(literal->string(), literal->place());
  return make_regex_pattern(pattern.string("Regex"), categories, pattern.place_of("Regex"));
}

Replacement::Replacement(const Entry& entry, const CategoryTable& categories)
    : pattern_(make_pattern(entry, categories)), content_(entry.string("content")) {
  const Json* literal = entry.required("pattern").find("String");
  const auto size = static_cast<double>(content_.size());
  // A regular expression may match nothing, before every byte.
  growth_ =
      literal
          ? std::max(1.0, size / static_cast<double>(literal->get_ref<const std::string&>().size()))
          : 1 + size;
}

void Replacement::apply(MarkedText& text, SearchBudget& budget, size_t max_bytes) const {
  std::vector<Span> matches;
  pattern_->find_all(text.bytes, matches, budget);
  if (matches.empty()) return;
  size_t size = text.bytes.size() + matches.size() * content_.size();
  for (const Span& match : matches) size -= match.size();
  check(size <= max_bytes, ErrorKind::invalid_argument,
        "the tokenizer's Replace makes {} bytes of a piece of text, more than {}", size, max_bytes);
  MarkedText out;
  out.bytes.reserve(size);
  size_t at = 0;
  for (const Span& match : matches) {
    out.append(text, at, match.begin);
    out.append(content_, text.has_mark(match.begin, match.end));
    at = match.end;
  }
  out.append(text, at, text.bytes.size());
  text = std::move(out);
}

}  // namespace nanovllm
