#include "cli/tools/tool_file.h"

#include <nlohmann/json.hpp>

#include "core/check.h"
#include "io/json.h"

namespace nanovllm::cli {
namespace {

constexpr auto kBad = ErrorKind::invalid_argument;
constexpr size_t kMaxFileBytes = size_t{4} << 20;

std::vector<std::string> take_command(Json& tool, size_t index) {
  const auto found = tool.is_object() ? tool.find("command") : tool.end();
  check(tool.is_object() && found != tool.end() && found->is_array() && !found->empty(), kBad,
        "tools[{}] has no command: give it \"command\": [\"PROGRAM\", \"ARGUMENT\", ...]", index);
  std::vector<std::string> command;
  for (const Json& text : *found) {
    check(text.is_string() && text.get_ref<const std::string&>().find('\0') == std::string::npos,
          kBad, "tools[{}].command must be a list of texts", index);
    command.push_back(text.get<std::string>());
  }
  check(!command.front().empty(), kBad, "tools[{}].command names no program", index);
  tool.erase(found);
  return command;
}

CommandTools read(const std::string& path) {
  Json list = parse_json(read_file(path, kMaxFileBytes), "the file", kBad);
  check(list.is_array() && !list.empty(), kBad, "must be a list of tools, with one at least");
  std::vector<std::vector<std::string>> commands;
  for (size_t i = 0; i < list.size(); ++i) commands.push_back(take_command(list[i], i));
  CommandTools tools{.tools = read_tools(list)};
  for (size_t i = 0; i < commands.size(); ++i)
    tools.commands[tools.tools[i].name] = std::move(commands[i]);
  return tools;
}

}  // namespace

CommandTools read_tool_file(const std::string& path) {
  try {
    return read(path);
  } catch (const Error& error) {
    const std::string what = error.what(),
                      named = what.starts_with(path) ? what : path + ": " + what;
    throw Error(kBad, "--tools " + named);
  }
}

}  // namespace nanovllm::cli
