// A conversation rendered for the tokenizer: text of control tokens that users, tools and documents
// wrote stays text (docs/contract.md, "What a request sees").
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "nanovllm/params.h"

#include "io/jinja/chat_template.h"

namespace nanovllm {

/// The text that a template made of a conversation, and the parts of it in which no special token
/// is to be found.
struct RenderedChat {
  std::string text;
  std::vector<TextRange> literal{};
};

/// Offsets of the characters of a text that are not to be read as part of a control token:
/// ControlTokens::find().
using FindControlText = std::function<std::vector<size_t>(std::string_view)>;

/// Cuts what a template wrote behind the text of the last of `messages`, as transformers'
/// continue_final_message does. Throws Error(invalid_argument) where that text is not to be found.
void end_in_final_message(RenderedChat& chat, const Json& messages);

class ChatRenderer {
 public:
  /// Parses a chat template; see ChatTemplate. Without `find_control_text` text of control tokens
  /// becomes the tokens whoever wrote it. Conversations with tools have `tool_source`, where that
  /// is not empty.
  ChatRenderer(std::string source, std::string name, FindControlText find_control_text = {},
               ChatClock clock = local_time_now, const std::string& tool_source = {});

  /// The templates' texts, one behind the other.
  const std::string& source() const { return source_; }
  /// The template of conversations with `tools`, which may be null.
  const ChatTemplate& chat_template(const Json& tools) const {
    return with_tools_ && !tools.is_null() ? *with_tools_ : template_;
  }
  /// `context` is what chat_context() makes. Throws Error(invalid_argument), as ChatTemplate does.
  RenderedChat render(Json context) const;

 private:
  std::string source_;
  ChatTemplate template_;
  std::optional<ChatTemplate> with_tools_;
  FindControlText find_control_text_;
};

}  // namespace nanovllm
