// The JSON form of a request's sampling parameters: vLLM's names, the same in JSON lines and in the
// server's bodies.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "nanovllm/params.h"

#include "io/json_object.h"

namespace nanovllm {

/// Reads the sampling parameters that `object` has into `params`; other fields of it are left
/// alone. Throws its error for a value of the wrong type, and for a parameter of vLLM's that this
/// engine lacks unless its value asks for nothing (null, or vLLM's default).
void read_sampling_params(const JsonObject& object, SamplingParams& params);

/// The same form of `params`, which read_sampling_params() reads to equal ones.
Json sampling_params_json(const SamplingParams& params);

/// The parameters that can be given.
std::vector<std::string> sampling_params_names();
/// Whether `name` is one of vLLM's parameters that this engine lacks.
bool is_missing_sampling_param(std::string_view name);

}  // namespace nanovllm
