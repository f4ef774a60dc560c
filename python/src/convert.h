// Between Python's values and the public API's.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "nanovllm/llm.h"
#include "nanovllm/tokenizer.h"

namespace nanovllm::python {

namespace nb = nanobind;

/// A str's UTF-8. Throws UnicodeEncodeError, a ValueError, for half of a surrogate pair.
std::string to_text(nb::handle text);
/// Text, a sequence of token ids, or {"prompt": ...} or {"prompt_token_ids": ...}, whose cache_salt
/// is a parameter of the request. A Prompt of apply_chat_template() is taken as it is. Throws
/// TypeError or ValueError.
Prompt to_prompt(nb::handle value);
/// Sets the fields of EngineConfig that `options` names. Throws TypeError for a name that there is
/// not and for a value of another type.
EngineConfig to_config(const nb::dict& options);
/// The names that to_config() takes.
std::vector<std::string> config_names();
/// The positions that a model directory's config.json makes it for. Throws Error(model).
int64_t longest_context(const std::string& directory);
/// Sampling parameters in their JSON form (io/request_json.h); `kind` as in vLLM:
/// 0 cumulative, 1 delta, 2 final_only.
SamplingParams to_params(const std::string& json, int kind);
/// Throws Error(invalid_argument) where no model would take them.
void check_params(const std::string& json);

/// (request_id, prompt_token_ids, answers, finished, error, prompt_logprobs, metrics); outputs.py
/// makes a RequestOutput of it. `tokenizer` may be null. Without `with_prompt` the ids of the
/// prompt are None.
nb::tuple to_python(const RequestOutput& output, const Tokenizer* tokenizer, bool with_prompt);
nb::dict to_python(const EngineInfo& info);
nb::dict to_python(const EngineStats& stats);
/// The parameters that the model's generation_config.json recommends.
nb::dict to_python(const SamplingParams& params);

/// Runs the handlers of signals that have come, on the main thread, and throws what they raise.
void raise_signals();

}  // namespace nanovllm::python
