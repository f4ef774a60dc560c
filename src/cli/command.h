// A command of the program: what add_*() registers, and what runs once the line is parsed.
#pragma once

#include <functional>

#include <CLI/CLI.hpp>

namespace nanovllm::cli {

/// Runs a command and returns the exit code. Throws Error and OutputError, which main() reports.
using Action = std::function<int()>;

// Each adds one command with its options; if the command is given, parsing sets `action`.
void add_generate(CLI::App& program, Action& action);
void add_chat(CLI::App& program, Action& action);
void add_bench(CLI::App& program, Action& action);
void add_tokenize(CLI::App& program, Action& action);
void add_inspect(CLI::App& program, Action& action);

}  // namespace nanovllm::cli
