// The text of --version.
#pragma once

#include <string>

namespace nanovllm::cli {

std::string version_line();  ///< "nanovllm 0.1.0 (0b93ddd)"
/// That, what was compiled in, and what was found when it ran.
std::string version_text();

}  // namespace nanovllm::cli
