// An answer's text taken apart as it comes: reasoning, content, tool calls.
//
//   ChatParser parser(choose_chat_format(chat_template), {.is_reasoning = ..., .tools = {...}});
//   while (...) show(parser.add(piece));
//   show(parser.finish());
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "chat/chat_format.h"
#include "chat/message.h"
#include "chat/tools.h"

namespace nanovllm {

/// How one answer is to be read.
struct ChatParserOptions {
  bool is_reasoning = false;  ///< the prompt has opened the block: ChatFormat::opens_reasoning()
  bool is_within = false;     ///< and has text in it, so that white space first is the answer's own
  std::vector<Tool> tools{};  ///< that may be called; none: calls stay text
  /// A call is given only once it is complete, as a whole answer needs it. Otherwise its arguments
  /// come as they are written, and those of a call that turns out not to parse stay incomplete.
  bool whole_calls = false;
  bool only_one_call = false;  ///< further ones are left out, as vLLM does without parallel calls
  uint64_t id_seed = 0;        ///< of the calls' ids, which no two answers should share
};

/// Text that does not parse as a call is content: nothing is lost but white space around the marks,
/// and nothing throws. However the text is cut into pieces, the deltas add up to the same.
class ChatParser {
 public:
  ChatParser(const ChatFormat& format, ChatParserOptions options);
  ~ChatParser();
  ChatParser(ChatParser&&) noexcept;
  ChatParser& operator=(ChatParser&&) noexcept;

  /// Takes the next piece of the text, whole UTF-8 characters.
  ChatDelta add(std::string_view text);
  /// The text has ended: what was held back. Nothing may be added any more.
  ChatDelta finish();
  /// Calls that have been given, or begun.
  size_t num_calls() const;

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace nanovllm
