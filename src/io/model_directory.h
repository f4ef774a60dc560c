// The directory that a model is read from.
#pragma once

#include <string>

namespace nanovllm {

/// Throws Error(model) where there is no directory `directory`, or it cannot be read.
void check_model_directory(const std::string& directory);

}  // namespace nanovllm
