// The grammars that make calls valid, as XGrammar's structural tags
// (https://xgrammar.mlc.ai/docs/tutorials/structural_tag): free text with structured parts in it.
#pragma once

#include <span>
#include <string>

#include "nanovllm/params.h"

#include "chat/chat_format.h"
#include "chat/tools.h"

namespace nanovllm {

struct CallConstraint {
  std::span<const Tool> tools;
  ToolChoice choice{};   ///< automatic: text is free, and from a call's mark on it is a valid call
  bool parallel = true;  ///< more than one call
  bool may_reason = false;       ///< a block of reasoning, marks included, may come first
  bool after_reasoning = false;  ///< the answer begins behind a block
  /// Where calls are automatic: of an answer that has none; any but a structural tag.
  const StructuredOutputs* structure = nullptr;
};

/// A structural tag, as JSON; empty where nothing can be forced: `automatic` calls whose beginning
/// no mark shows. Throws Error(invalid_argument) for a strict tool with such calls, and for a
/// strict one whose schema bare values cannot keep (Qwen3-Coder's).
std::string structural_tag(const ChatFormat& format, const CallConstraint& constraint);

/// The structural tag of an answer that may begin with a block of reasoning and then has the
/// structure `asked` for: any but a structural tag.
std::string structure_after_reasoning(const StructuredOutputs& asked,
                                      const ReasoningFormat& reasoning);

}  // namespace nanovllm
