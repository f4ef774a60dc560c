// How commands and their options are declared: one name, one environment twin, one message for a
// bad value; and the options that commands share.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "nanovllm/llm.h"

namespace CLI {  // its header takes seconds to compile: options.cpp and main.cpp alone see it
class App;
class Option;
}  // namespace CLI

namespace nanovllm::cli {

/// Runs a command and returns the exit code. Throws Error and OutputError, which main() reports.
using Action = std::function<int()>;

/// Adds a command to the program, or one to a command that is a group of them. One without a `help`
/// text is hidden.
CLI::App& add_command(CLI::App& parent, const std::string& name, const std::string& help);
/// If `command` is given, parsing sets `action` to `run`.
void set_action(CLI::App& command, Action& action, Action run);

// Readers of an option's text. Each throws Error(invalid_argument) with the end of a sentence that
// begins with the option: "must be an integer from 1 to 8, got "x"".
int64_t parse_integer(std::string_view text, int64_t min,
                      int64_t max = std::numeric_limits<int64_t>::max());
/// "inf" and "nan" are numbers, too: the range is for the caller to check.
double parse_number(std::string_view text);
/// An integer that may end in k, m, g or t, thousands and so on, or in K, M, G or T, powers of 1024
/// (also KiB ...), as in vLLM: "32K", "4G".
int64_t parse_size(std::string_view text, int64_t min,
                   int64_t max = std::numeric_limits<int64_t>::max());
/// The parts of a text between its separators, of which an empty text has one.
std::vector<std::string> split(std::string_view text, char separator);
/// One of `choices`, as it stands.
std::string one_of(const std::string& text, std::initializer_list<const char*> choices);
/// "1,16,64" or a single number.
std::vector<int64_t> parse_integers(std::string_view text, int64_t min,
                                    int64_t max = std::numeric_limits<int64_t>::max());

/// Adds an option with a value; `set` is called with each value given, the last one last, so that a
/// script's defaults can be overridden by what follows. Its Error gets the option's name in front,
/// and that of its environment twin if the value stands there. `type` stands for the value in the
/// help.
CLI::Option* add_value(CLI::App& command, const std::string& names, const std::string& type,
                       const std::string& help, std::function<void(const std::string&)> set);

/// The text of a file that an option names. Throws Error(invalid_argument) where it cannot be read,
/// is empty, or has more bytes.
std::string read_option_file(const std::string& path, size_t max_bytes);
/// The same when options have been parsed: errors name `option`. The file may be empty.
std::string read_file_of(const char* option, const std::string& path, size_t max_bytes);

/// Adds an option without a value. One without a `help` text is hidden.
CLI::Option* add_flag(CLI::App& command, const std::string& names, bool& value,
                      const std::string& help);

/// Adds an argument that stands in its place, without a name, and may be left out.
CLI::Option* add_argument(CLI::App& command, const std::string& names, const std::string& help,
                          std::function<void(const std::string&)> set);

/// The environment twins: --max-model-len is NANOVLLM_MAX_MODEL_LEN. The command line wins. Options
/// that say what one run reads and writes (--prompt, --json) have none.
void name_environment_twins(CLI::App& command);

/// A flag's value that is neither yes nor no ("--quiet=maybe", or its twin) throws
/// Error(invalid_argument) when it is parsed.
void check_flags(CLI::App& command);

/// The model directory, as an argument or with vLLM's --model; NANOVLLM_MODEL stands in for both.
void add_model(CLI::App& command, std::string& model);
/// Throws Error(invalid_argument) if no model was given.
void require_model(const std::string& model);

/// The model as add_model() has it, and a text behind it. settle_model() has to follow.
void add_model_and_text(CLI::App& command, std::string& model, std::optional<std::string>& text,
                        const char* name, const char* help);
/// Finds the model of add_model_and_text(): where NANOVLLM_MODEL names one, an argument by itself
/// that names none is the text. Throws as require_model() and find_model() do.
void settle_model(std::string& model, std::optional<std::string>& text);

/// vLLM's engine options.
void add_engine_options(CLI::App& command, EngineConfig& config);

/// Sampling options given on the command line: what they change, in the order given.
class SamplingOptions {
 public:
  /// In a chat an answer may be as long as the context allows, and log probabilities are not shown.
  enum class Use { generate, chat };
  void add_to(CLI::App& command, Use use);
  /// Sets the fields that the command line names and leaves the others.
  void apply(SamplingParams& params) const;

 private:
  void add_rules(CLI::App& command);  // about single tokens and texts
  void add_structure(CLI::App& command);
  void add(CLI::App& command, const std::string& names, const std::string& type,
           const std::string& help,
           std::function<std::function<void(SamplingParams&)>(const std::string&)> parse);
  std::vector<std::function<void(SamplingParams&)>> changes_;
};

}  // namespace nanovllm::cli
