// The commands of the program.
#pragma once

#include "cli/options.h"

namespace nanovllm::cli {

// Each adds one command with its options; if the command is given, parsing sets `action`.
void add_generate(CLI::App& program, Action& action);
void add_chat(CLI::App& program, Action& action);
void add_serve(CLI::App& program, Action& action);
void add_top(CLI::App& program, Action& action);
void add_bench(CLI::App& program, Action& action);
void add_quantize(CLI::App& program, Action& action);
void add_tokenize(CLI::App& program, Action& action);
void add_inspect(CLI::App& program, Action& action);
void add_doctor(CLI::App& program, Action& action);
// Hidden: for installations.
void add_completion(CLI::App& program, Action& action);
void add_manual(CLI::App& program, Action& action);

}  // namespace nanovllm::cli
