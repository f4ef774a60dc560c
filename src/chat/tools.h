// The tools that a model may call, and whether it must.
#pragma once

#include <string>
#include <vector>

#include "io/json.h"

namespace nanovllm {

struct Tool {
  std::string name, description{};
  std::string parameters{};  ///< JSON schema of the arguments, as JSON; empty: any object
  bool strict = false;       ///< a grammar forces the arguments of every call
  std::string definition{};  ///< as the client gave it, for the template; empty: from the above
};

struct ToolChoice {
  enum Kind { none, automatic, required, named } kind = automatic;
  std::string name{};                  ///< of the one tool that must be called
  std::vector<std::string> allowed{};  ///< names of those that may be called; empty: all
};

/// OpenAI's list of {"type": "function", "function": {...}}, or of the flat objects of its
/// Responses API. Throws Error(invalid_argument) that begins with "tools" and names what is wrong.
std::vector<Tool> read_tools(const Json& tools);
/// OpenAI's "none", "auto", "required", {"type": "function", "function": {"name"}} or {"type":
/// "allowed_tools", "allowed_tools": {"mode", "tools"}} (Responses: flat objects). Throws
/// Error(invalid_argument) that begins with "tool_choice".
ToolChoice read_tool_choice(const Json& choice, const std::vector<Tool>& tools);
/// A tool's schema, or `absent` where it has none.
Json parameters_of(const Tool& tool, Json absent);

/// The tool with a schema that has no more than the names of the arguments.
Tool with_names_alone(Tool tool);

/// The list as chat templates expect it.
Json tools_for_template(const std::vector<Tool>& tools);

/// Messages in OpenAI's form as templates expect them: the argument strings of "tool_calls" as
/// objects, an answer's or a tool's content where there is none, the developer's as the system's
/// and all of these in the first, texts of all kinds as parts of the type text. Throws
/// Error(invalid_argument) that names the message. Leaves alone what is no list: the template's to
/// refuse.
void complete_messages(Json& messages);

}  // namespace nanovllm
