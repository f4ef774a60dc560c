// Loading a model in front of a user: progress while it lasts, then what is worth knowing.
#pragma once

#include <optional>
#include <string>

#include "cli/options.h"
#include "cli/terminal/progress.h"

namespace nanovllm::cli {

/// An engine loaded with `config` tells `progress`, which outlives the loading.
void show_loading(EngineConfig& config, Progress& progress);

/// Under mpirun, in all processes but rank 0's: serves until rank 0 ends, and returns the exit
/// code. What mpirun's Ctrl-C, which reaches all of them, means is rank 0's to say: here the first
/// one is ignored, and what follows from it is not reported. Nothing elsewhere.
std::optional<int> serve_as_other_rank(const std::string& model, const EngineConfig& config);

/// Loads `model`, showing `progress`, and prints the engine's notes to standard error unless
/// `quiet`.
LLM load_model(const std::string& model, EngineConfig config, Progress& progress, bool quiet);

/// --system: the system message, which must be UTF-8.
void add_system(CLI::App& command, std::string& system, const char* help);

/// `name`: variables for the chat template, a JSON object.
void add_template_kwargs(CLI::App& command, std::string& kwargs,
                         const char* name = "--chat-template-kwargs");

/// --chat-template: a file with a template in place of the model's. `place` names it in errors.
void add_chat_template(CLI::App& command, std::string& source, std::string& place);

/// Where sampling parameters that a user leaves open come from: "auto" is the model's
/// generation_config.json, "vllm" the defaults of SamplingParams.
void add_generation_config(CLI::App& command, std::string& source);

}  // namespace nanovllm::cli
