// The prompts of conversations: a chat template over messages that users and models wrote.
#pragma once

#include <optional>
#include <string>

#include <nlohmann/json.hpp>

#include "nanovllm/llm.h"

#include "io/jinja/chat_renderer.h"

namespace nanovllm {

/// Immutable: several threads may make prompts at once.
class ChatPrompts {
 public:
  /// The template that the tokenizer has. One that is missing or broken is a fault of the
  /// conversations alone: prompt() throws it.
  ChatPrompts(const Tokenizer* tokenizer, bool parse_special);
  /// Another template; `place` names it in errors. Throws Error(model) for bad syntax.
  ChatPrompts(const Tokenizer* tokenizer, bool parse_special, const std::string& source,
              const std::string& place);

  ChatPrompts with_template(const std::string& source, const std::string& place) const {
    return {tokenizer_, parse_special_, source, place};
  }

  /// The prompt that LLM::chat_prompt() makes of the same as text.
  Prompt prompt(Json messages, Json options) const;
  /// The text of the templates; empty where there is none.
  std::string source() const { return renderer_ ? renderer_->source() : std::string(); }

 private:
  void parse(const std::string& source, const std::string& place, const std::string& tools);

  const Tokenizer* tokenizer_;  // outlives this; may be null
  bool parse_special_;
  std::optional<ChatRenderer> renderer_;
  std::string no_chat_;  // why there is none: completions work all the same
};

}  // namespace nanovllm
