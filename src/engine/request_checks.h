// The checks of a request, in full when it is added: one that passes can never hurt a step. And
// those of an engine's options.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "nanovllm/params.h"

namespace nanovllm {

/// Why these parameters are not acceptable ("temperature is nan: it must be from 0 to 10000"), or
/// nothing.
std::optional<std::string> problem_with(const SamplingParams& params, int64_t vocab_size);
/// Why these tokens cannot be a prompt, or nothing.
std::optional<std::string> problem_with(std::span<const int32_t> prompt, int64_t vocab_size);
/// Throws Error(invalid_argument) that names the option.
void check_config(const EngineConfig& config);

}  // namespace nanovllm
