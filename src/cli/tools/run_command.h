// A command of the user's that a model's call runs: without a shell, within limits, and with
// nothing of this program but its arguments.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "cli/terminal/interrupt.h"

namespace nanovllm::cli {

struct CommandLimits {
  std::chrono::milliseconds time{30'000};
  size_t output_bytes = size_t{64} << 10;
};

struct CommandResult {
  std::string output{};   ///< what it wrote, valid UTF-8
  std::string problem{};  ///< why that is not a result; empty if the command succeeded
};

/// Runs `command`, a program (looked up in PATH) and its arguments, with `input` as its standard
/// input. It has a session and so a process group of its own, no terminal, no open files, and of
/// the environment what names places and languages (PATH, HOME, LANG, ...): no keys. When it has
/// ended, or has to (a limit, a signal of `interrupt`), all that is left of its process group is
/// killed. Never throws for what the command does.
CommandResult run_command(const std::vector<std::string>& command, std::string_view input,
                          const Interrupt& interrupt, const CommandLimits& limits = {});

}  // namespace nanovllm::cli
