// The text of --version.
#pragma once

#include <string>

namespace nanovllm::cli {

std::string version_line();  ///< "nanovllm 0.1.0 (0b93ddd)"
/// The line, then what was compiled in and what is found on this machine.
std::string version_text();

}  // namespace nanovllm::cli
