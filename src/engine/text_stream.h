// TextStream: the text of one request as it grows, with stop strings. Text that may still become a
// stop string is held back, so that text which was shown is never taken back.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "nanovllm/params.h"
#include "nanovllm/tokenizer.h"

namespace nanovllm {

class TextStream {
 public:
  TextStream(const Tokenizer& tokenizer, const SamplingParams& params);

  /// Adds a token. Returns the stop string that now stands in the text, if `may_stop`; the text
  /// then ends before it (or after it, with include_stop_str_in_output), and nothing may be added
  /// any more.
  std::optional<std::string> add(int32_t token_id, bool may_stop);
  /// The request ended otherwise: nothing is held back any more.
  void finish();

  const std::string& text() const { return text_; }  ///< all of it; the end may be held back
  size_t visible() const { return visible_; }        ///< bytes of text() that are certain

 private:
  std::optional<std::string> find_stop(size_t before);
  size_t held_back() const;

  IncrementalDetokenizer detokenizer_;
  const std::vector<std::string>* stops_;  // SamplingParams::stop of the request
  bool include_stop_;
  std::string text_;
  size_t visible_ = 0;
};

}  // namespace nanovllm
