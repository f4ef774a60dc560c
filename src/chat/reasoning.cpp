#include "chat/reasoning.h"

#include <algorithm>

#include "chat/calls/call_reader.h"

namespace nanovllm {

ReasoningSplitter::ReasoningSplitter(const ReasoningFormat* format, bool is_inside, bool is_within)
    : format_(format) {
  enter(!format ? plain : is_inside ? inside : before);
  skips_space_ = !is_within;
}

// Each state looks for marks of its own.
void ReasoningSplitter::enter(int state) {
  state_ = static_cast<decltype(state_)>(state);
  skips_space_ = true;
  std::span<const std::string_view> marks;
  if (state_ == before) marks = format_->begin;
  if (state_ == inside) marks = format_->end;
  if (state_ == gap) marks = format_->content_begin;
  if (state_ == wrapped) marks = format_->content_end;
  finder_ = MarkFinder(marks);
}

void ReasoningSplitter::add(std::string_view text, std::string& reasoning, std::string& content) {
  while (!text.empty() && state_ != plain) {
    take(text.front(), reasoning, content);
    text.remove_prefix(1);
  }
  content += text;
}

void ReasoningSplitter::take(char c, std::string& reasoning, std::string& content) {
  if (skips_space_ && state_ != before && is_space(c)) return;
  skips_space_ = false;
  std::string& text = state_ == inside ? reasoning : content;
  const size_t size = text.size();
  if (const auto mark = finder_.take(c, text)) {
    const bool is_content =
        std::ranges::find(format_->content_begin, *mark) != format_->content_begin.end();
    return enter(state_ == inside ? gap : state_ == before && !is_content ? inside : wrapped);
  }
  if (text.size() == size || state_ == inside || state_ == wrapped) return;
  finder_.flush(content);  // no mark stands at the beginning
  enter(plain);
}

void ReasoningSplitter::finish(std::string& reasoning, std::string& content) {
  finder_.flush(state_ == inside ? reasoning : content);
}

ReasoningTokens::ReasoningTokens(const ReasoningFormat& format, bool is_inside,
                                 const Tokenizer& tokenizer)
    : splitter_(&format, is_inside), detokenizer_(tokenizer, /*skip_special_tokens=*/false) {}

void ReasoningTokens::add(int32_t id) {
  if (splitter_.has_ended()) return;
  const bool was_inside = splitter_.is_inside();
  std::string reasoning, content;
  splitter_.add(detokenizer_.add(id), reasoning, content);
  if (was_inside && splitter_.is_inside()) ++count_;
}

}  // namespace nanovllm
