#pragma once

#include "models/model.h"

namespace nanovllm {

/// LlamaForCausalLM (transformers: models/llama/modeling_llama.py).
std::unique_ptr<Model> make_llama(const ModelConfig& config, const ModelContext& context);

}  // namespace nanovllm
