// The file of chat --tools: what a model may call, and the command that each call runs.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "chat/tools.h"

namespace nanovllm::cli {

struct CommandTools {
  std::vector<Tool> tools{};
  std::map<std::string, std::vector<std::string>> commands{};  ///< by the tool's name
};

/// OpenAI's list of tools, each with a "command" beside its "type": a program and its arguments.
/// Throws Error(invalid_argument) that begins with "--tools" and the path.
CommandTools read_tool_file(const std::string& path);

}  // namespace nanovllm::cli
