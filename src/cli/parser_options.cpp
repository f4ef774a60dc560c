#include "cli/parser_options.h"

#include <algorithm>

#include <fmt/ranges.h>

#include "chat/chat_format.h"
#include "core/check.h"
#include "io/json.h"

namespace nanovllm::cli {
namespace {

void add_parser(CLI::App& command, const char* option, const char* help, std::string& name,
                std::vector<std::string> (*known)()) {
  add_value(command, option, "NAME", help, [&name, known](const std::string& s) {
    const auto names = known();
    check(s.empty() || std::ranges::find(names, s) != names.end(), ErrorKind::invalid_argument,
          "must be one of {}, got {}", fmt::join(names, ", "), quote(s));
    name = s;
  });
}

}  // namespace

void add_tool_call_parser(CLI::App& command, std::string& name) {
  add_parser(command, "--tool-call-parser",
             "how the model writes tool calls (by its chat template); or none", name,
             tool_call_parser_names);
}

void add_reasoning_parser(CLI::App& command, std::string& name) {
  add_parser(command, "--reasoning-parser",
             "how it writes reasoning (by its chat template); or none", name,
             reasoning_parser_names);
}

}  // namespace nanovllm::cli
