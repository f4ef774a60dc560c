// The program's commands and options as plain values, read from the command line's own
// declarations: completions and the manual page are made from them and cannot be stale.
#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace nanovllm::cli {

struct OptionFacts {
  std::vector<std::string> names{};    ///< "--prompt", "-p"; empty for an argument without a name
  std::string argument{};              ///< "MODEL", where it may stand without a name
  std::string value{};                 ///< "FILE", "N", "auto|cpu"; empty for a flag
  std::vector<std::string> choices{};  ///< of `value`, where it lists them
  std::string help{}, group{}, environment{};
};

struct CommandFacts {
  std::string path{};  ///< "" of the program, "generate", "bench latency"
  std::string help{};
  std::vector<OptionFacts> options{};  ///< hidden ones left out, and so are hidden commands
  std::vector<CommandFacts> commands{};

  std::string name() const { return path.substr(path.rfind(' ') + 1); }
};

CommandFacts command_tree(const CLI::App& program);

/// The program and all commands below it, in order.
std::vector<const CommandFacts*> all_commands(const CommandFacts& program);

}  // namespace nanovllm::cli
