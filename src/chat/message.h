// The message that an answer's text is: reasoning and tool calls, whole or as they come.
#pragma once

#include <string>
#include <vector>

namespace nanovllm {

struct ToolCall {
  std::string id, name;
  std::string arguments;  ///< a JSON object, as the model wrote it
};

/// News of one call. The first of a call has its id and name, and no arguments; those that follow
/// have pieces of the arguments, which add up to one JSON object.
struct ToolCallDelta {
  size_t index = 0;  ///< of the call within the answer
  std::string id{}, name{}, arguments{};
};

/// News from one piece of an answer's text.
struct ChatDelta {
  std::string reasoning{}, content{};
  std::vector<ToolCallDelta> tool_calls{};
  void add(const ChatDelta& more);
  bool empty() const { return reasoning.empty() && content.empty() && tool_calls.empty(); }
};

struct ChatMessage {
  std::string reasoning{}, content{};
  std::vector<ToolCall> tool_calls{};
  void add(const ChatDelta& delta);
  /// All of it as one delta, each call with its arguments.
  ChatDelta delta() const;
};

}  // namespace nanovllm
