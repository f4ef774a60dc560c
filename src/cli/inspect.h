// What `nanovllm inspect` says of a model, for other commands that say it too.
#pragma once

#include "nanovllm/llm.h"

#include "io/json.h"

namespace nanovllm::cli {

/// Sequences of `length` tokens, no prefix shared, that the KV cache holds at once.
int64_t fitting_sequences(const EngineInfo& info, int64_t length);

/// What `inspect --json` prints.
Json inspection_json(const EngineInfo& info);

}  // namespace nanovllm::cli
