#include "io/tokenizer/patterns/class_pattern.h"

#include <algorithm>
#include <bit>

#include "io/utf8.h"

namespace nanovllm {
namespace {

constexpr size_t kNoMatch = std::string_view::npos;

size_t previous_char(std::string_view text, size_t at) {
  do {
    --at;
  } while (is_utf8_continuation(text[at]));
  return at;
}

}  // namespace

bool ClassPattern::can_be_empty(const Sequence& sequence) const {
  return std::all_of(sequence.begin(), sequence.end(), [](const Item& item) {
    return item.kind == ItemKind::not_ahead || item.min == 0;
  });
}

bool ClassPattern::can_start_with(const Sequence& sequence, size_t character) const {
  if (character >= 128) return true;
  const auto c = static_cast<unsigned char>(character);
  for (const Item& item : sequence) {
    if (item.kind == ItemKind::not_ahead) continue;
    const bool fits =
        item.kind == ItemKind::repeat
            ? item.char_class.contains_ascii(c)
            : std::any_of(item.options.begin(), item.options.end(),
                          [c](const auto& option) { return option.front().contains_ascii(c); });
    if (fits) return true;
    if (item.min > 0) return false;
  }
  return false;
}

void ClassPattern::index_first_characters() {
  for (size_t c = 0; c < starts_.size(); ++c)
    for (size_t i = 0; i < alternatives_.size(); ++i)
      if (can_start_with(alternatives_[i], c)) starts_[c] |= uint32_t{1} << i;
}

bool ClassPattern::enter_choice(const Item& item, std::string_view text, size_t at,
                                size_t first_option, Frame& frame) const {
  for (size_t i = first_option; i < item.options.size(); ++i) {
    size_t end = at;
    bool fits = true;
    for (const CharClass& char_class : item.options[i]) {
      if (end == text.size()) {
        fits = false;
        break;
      }
      const DecodedChar c = decode_utf8(text.data() + end);
      if (!char_class.contains(c.value, categories_)) {
        fits = false;
        break;
      }
      end += c.length;
    }
    if (fits) {
      frame = {at, end, i};
      return true;
    }
  }
  frame = {at, at, item.options.size()};
  return item.min == 0;
}

bool ClassPattern::enter(const Item& item, std::string_view text, size_t at, Frame& frame) const {
  if (item.kind == ItemKind::choice) return enter_choice(item, text, at, 0, frame);
  if (item.kind == ItemKind::not_ahead) {
    frame = {at, at, 0};
    return at == text.size() ||
           !item.char_class.contains(decode_utf8(text.data() + at).value, categories_);
  }
  frame.shortest = at;
  size_t count = 0;
  while (count < item.max && at < text.size()) {
    const auto byte = static_cast<unsigned char>(text[at]);
    size_t length = 1;
    if (byte < 0x80) {
      if (!item.char_class.contains_ascii(byte)) break;
    } else {
      const DecodedChar c = decode_utf8(text.data() + at);
      if (!item.char_class.contains(c.value, categories_)) break;
      length = c.length;
    }
    at += length;
    if (++count == item.min) frame.shortest = at;
  }
  frame.end = at;
  return count >= item.min;
}

bool ClassPattern::retreat(const Item& item, std::string_view text, size_t begin,
                           Frame& frame) const {
  if (item.kind == ItemKind::not_ahead) return false;
  if (item.kind == ItemKind::choice)
    return frame.option < item.options.size() &&
           enter_choice(item, text, begin, frame.option + 1, frame);
  if (item.possessive || frame.end == frame.shortest) return false;
  frame.end = previous_char(text, frame.end);
  return true;
}

size_t ClassPattern::match(const Sequence& sequence, std::string_view text, size_t begin,
                           SearchBudget& budget) const {
  std::array<Frame, kMaxItems> frames;
  const auto start_of = [&](size_t i) { return i == 0 ? begin : frames[i - 1].end; };
  size_t i = 0;
  while (i < sequence.size()) {
    const size_t at = start_of(i);
    const bool fits = enter(sequence[i], text, at, frames[i]);
    if (!budget.spend(frames[i].end - at + 1)) refuse_work(text);
    if (fits) {
      ++i;
      continue;
    }
    do {
      if (i == 0) return kNoMatch;
      --i;
    } while (!retreat(sequence[i], text, start_of(i), frames[i]));
    ++i;
  }
  return frames[i - 1].end;
}

void ClassPattern::find_all(std::string_view text, std::vector<Span>& matches,
                            SearchBudget& budget) const {
  for (size_t at = 0; at < text.size();) {
    const size_t first = std::min<size_t>(static_cast<unsigned char>(text[at]), 128);
    size_t end = kNoMatch;
    for (uint32_t untried = starts_[first]; untried != 0 && end == kNoMatch;
         untried &= untried - 1) {
      const auto i = static_cast<size_t>(std::countr_zero(untried));
      end = match(alternatives_[i], text, at, budget);
    }
    if (end == kNoMatch) {
      at += decode_utf8(text.data() + at).length;
    } else {
      matches.push_back({at, end});
      at = end;
    }
  }
}

}  // namespace nanovllm
