// Runs the built program as a user would: arguments, environment and standard input in; output,
// errors and exit code out.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "io/json.h"

namespace nanovllm {

struct ProcessOptions {
  std::string input;                               ///< standard input; then it ends
  bool keep_input_open = false;                    ///< or does not end before the program does
  std::map<std::string, std::string> environment;  ///< on top of this process's own
  std::string output_file;  ///< standard output goes there instead ("/dev/full")
  /// Called with all of standard output so far whenever there is more; a signal number that it
  /// returns is sent once. Until then output is taken byte by byte from a pipe of one page: a
  /// program that has more to write waits for the signal, however fast it is.
  std::function<int(const std::string& output)> signal_when;
  std::chrono::seconds time_limit{300};
};

struct ProcessResult {
  /// 128 + signal if a signal ended it; 124 if it ran past the limit and was killed.
  int exit_code = -1;
  std::string output, errors;
  size_t input_before_output = 0;  ///< bytes of input that it took before its first output
  /// standard output as JSON lines
  std::vector<Json> lines() const;
};

/// Runs `program` with `arguments`.
ProcessResult run_process(const std::filesystem::path& program, std::vector<std::string> arguments,
                          const ProcessOptions& options = {});

/// Runs the built nanovllm. Generation is on the CPU with two threads unless the arguments name a
/// device.
ProcessResult nanovllm_program(std::vector<std::string> arguments,
                               const ProcessOptions& options = {});

/// models/demo
std::string demo_model();

/// `arguments` and what makes answers of models/demo take minutes on any machine.
std::vector<std::string> with_endless(std::vector<std::string> arguments);

/// The lines of a file as JSON.
std::vector<Json> json_lines(const std::string& text);
std::string file_text(const std::filesystem::path& path);
void write_file(const std::filesystem::path& path, const std::string& text);

}  // namespace nanovllm
