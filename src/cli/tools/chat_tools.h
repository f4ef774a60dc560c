// chat --tools: what a model may call in a conversation, and the calls' way to commands, each of
// which the user has to allow.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "nanovllm/llm.h"

#include "chat/chat_parser.h"
#include "cli/terminal/chat_input.h"
#include "cli/terminal/interrupt.h"
#include "cli/tools/tool_file.h"
#include "io/json.h"

namespace nanovllm::cli {

class ChatTools {
 public:
  /// Throws Error(invalid_argument) where the model's template shows no way of writing calls and
  /// `parser` names none. `llm` must outlive this.
  ChatTools(const LLM& llm, CommandTools file, const std::string& chat_template,
            const std::string& parser);

  /// The tools as the template is told of them.
  const Json& for_template() const { return for_template_; }
  /// Asks of an answer to `prompt` what makes its calls readable and, where a grammar can, valid.
  void prepare(std::string_view prompt, SamplingParams& params) const;
  /// Reads an answer to `prompt`.
  ChatParser new_parser(std::string_view prompt, uint64_t id_seed) const;

  /// Asks for each call, runs those that are allowed, and adds a message with its result for each
  /// to `messages`. False if the user has interrupted it.
  bool run(const std::vector<ToolCall>& calls, ChatInput& input, const Interrupt& interrupt,
           Json& messages) const;

 private:
  std::string result_of(const ToolCall& call, ChatInput& input, const Interrupt& interrupt) const;

  const LLM& llm_;
  const CommandTools file_;
  const ChatFormat format_;
  const Json for_template_;
};

/// A model's text, for a terminal: its control characters are spelled out, but for line ends
/// and tabs, so that it can paint over no question.
std::string without_controls(std::string_view text);

/// The message of an answer, as the template reads it.
Json assistant_message(const ChatMessage& answer);

}  // namespace nanovllm::cli
