#include "engine/text_stream.h"

namespace nanovllm {

TextStream::TextStream(const Tokenizer& tokenizer, const SamplingParams& params)
    : detokenizer_(tokenizer, params.skip_special_tokens, params.visible_special_token_ids),
      stops_(&params.stop),
      include_stop_(params.include_stop_str_in_output) {}

std::optional<std::string> TextStream::add(int32_t token_id, bool may_stop) {
  const size_t before = text_.size();
  text_ += detokenizer_.add(token_id);
  if (may_stop)
    if (auto stop = find_stop(before)) return stop;
  visible_ = text_.size() - held_back();
  return std::nullopt;
}

// The stop string that begins first among those that end after the first `before` bytes; of
// several that begin there, the first in the request's list. A stop string that ended before was
// not allowed to stop.
std::optional<std::string> TextStream::find_stop(size_t before) {
  size_t first = std::string::npos;
  const std::string* found = nullptr;
  for (const std::string& stop : *stops_) {
    const size_t at = text_.find(stop, before >= stop.size() ? before - stop.size() + 1 : 0);
    if (at < first) {
      first = at;
      found = &stop;
    }
  }
  if (!found) return std::nullopt;
  text_.resize(include_stop_ ? first + found->size() : first);
  visible_ = text_.size();
  return *found;
}

// Length of the longest end of the text that is a proper beginning of a stop string. None begins
// before visible_: it would have been one already.
size_t TextStream::held_back() const {
  for (size_t n = text_.size() - visible_; n > 0; --n)
    for (const std::string& stop : *stops_)
      if (n < stop.size() && text_.compare(text_.size() - n, n, stop, 0, n) == 0) return n;
  return 0;
}

void TextStream::finish() {
  text_ += detokenizer_.flush();
  visible_ = text_.size();
}

}  // namespace nanovllm
