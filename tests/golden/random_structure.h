// The structures that the answers of GrammarLLM's requests must have.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "chat/structural_tag.h"
#include "constrain/grammar_compiler.h"

namespace nanovllm {

/// A third each: a grammar of the whole answer, one behind a reasoning, and calls of tools as the
/// server asks for them, where there is the module. `pick` draws from a range.
inline StructuredOutputs random_structure(const std::function<int(int, int)>& pick) {
  StructuredOutputs asked;
  const int kind = pick(0, 2);
  if (kind > 0) asked.thinking_token_budget = pick(0, 30);
  std::string why;
  if (kind < 2 || grammar_library(why).empty()) {
    asked.grammar = std::to_string(pick(0, 1 << 20));
    return asked;
  }
  const std::vector<Tool> tools = {
      {.name = "add", .parameters = R"({"type": "object", "properties": {"a": {"type": "integer"},
           "b": {"enum": ["x", "y"]}}, "required": ["a", "b"], "additionalProperties": false})"},
      {.name = "now", .parameters = R"({"type": "object"})"}};
  const bool must = pick(0, 1) == 0, thinks = pick(0, 1) == 0;
  asked.structural_tag =
      structural_tag(choose_chat_format("", "hermes", "qwen3"),
                     {.tools = tools,
                      .choice = {.kind = must ? ToolChoice::required : ToolChoice::automatic},
                      .parallel = pick(0, 1) == 0,
                      .may_reason = !thinks,
                      .after_reasoning = thinks});
  if (thinks)
    asked.reasoning_end = "</think>";
  else
    asked.thinking_token_budget = -1;
  return asked;
}

}  // namespace nanovllm
