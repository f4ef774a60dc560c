// An answer's content apart from its tool calls.
#pragma once

#include <string>
#include <string_view>

#include "chat/calls/call_reader.h"
#include "chat/chat_parser.h"
#include "chat/mark_finder.h"

namespace nanovllm {

class ToolCallParser final : CallSink {
 public:
  /// `format` and `options` outlive the parser.
  ToolCallParser(const ToolFormat& format, const ChatParserOptions& options);

  void add(std::string_view text, ChatDelta& delta);
  void finish(ChatDelta& delta);
  size_t num_calls() const { return num_calls_; }

 private:
  void take_text(char c, ChatDelta& delta);
  void take_block(char c, ChatDelta& delta);
  void open(std::string_view mark);
  void end_block(ChatDelta& delta, bool refused);
  void begin_call(std::string name) override;
  void add_arguments(std::string_view json) override;
  void end_call() override;
  void give(ToolCallDelta&& news);
  std::string new_id() const;

  const ToolFormat& format_;
  const ChatParserOptions& options_;
  bool at_start_ = true;  // of the content, white space apart
  MarkFinder finder_;
  std::unique_ptr<CallReader> reader_;  // of the block that is open
  std::string raw_;                     // its text, as far as no call has it
  ToolCallDelta call_;                  // the one at hand, with whole_calls
  bool in_call_ = false, is_left_out_ = false;
  size_t num_calls_ = 0;
  ChatDelta* delta_ = nullptr;  // of the piece at hand
};

}  // namespace nanovllm
