// How a model writes tool calls and reasoning, where its chat template does not say: of the
// commands that take answers apart.
#pragma once

#include <string>

#include "cli/options.h"

namespace nanovllm::cli {

void add_tool_call_parser(CLI::App& command, std::string& name);
void add_reasoning_parser(CLI::App& command, std::string& name);

}  // namespace nanovllm::cli
