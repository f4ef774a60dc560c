// Reasoning apart from the answer proper.
#pragma once

#include <string>
#include <string_view>

#include "chat/chat_format.h"
#include "chat/mark_finder.h"

namespace nanovllm {

/// The block stands at the beginning of an answer, or the prompt has opened it. White space next to
/// the marks goes with them.
class ReasoningSplitter {
 public:
  /// `format` may be null: all is content. `is_within`: ChatParserOptions.
  ReasoningSplitter(const ReasoningFormat* format, bool is_inside, bool is_within = false);

  void add(std::string_view text, std::string& reasoning, std::string& content);
  void finish(std::string& reasoning, std::string& content);
  /// Within the block.
  bool is_inside() const { return state_ == inside; }
  /// Behind the block, or known to have none.
  bool has_ended() const { return state_ > inside; }

 private:
  void take(char c, std::string& reasoning, std::string& content);
  void enter(int state);

  const ReasoningFormat* format_;
  enum { before, inside, gap, wrapped, plain } state_;
  MarkFinder finder_;
  bool skips_space_ = true;  // right behind a mark
};

/// Tokens of a reasoning block, found as they come; those of its marks do not count.
class ReasoningTokens {
 public:
  ReasoningTokens(const ReasoningFormat& format, bool is_inside, const Tokenizer& tokenizer);
  void add(int32_t id);
  int64_t count() const { return count_; }

 private:
  ReasoningSplitter splitter_;
  IncrementalDetokenizer detokenizer_;
  int64_t count_ = 0;
};

}  // namespace nanovllm
