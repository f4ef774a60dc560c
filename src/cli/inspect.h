// The facts that `nanovllm inspect` prints of a model, for other commands that print them too.
#pragma once

#include "nanovllm/llm.h"

#include "io/json.h"

namespace nanovllm::cli {

/// Sequences of `length` tokens, no prefix shared, that the KV cache holds at once.
int64_t fitting_sequences(const EngineInfo& info, int64_t length);

/// The object that `inspect --json` prints.
Json inspection_json(const EngineInfo& info);

}  // namespace nanovllm::cli
