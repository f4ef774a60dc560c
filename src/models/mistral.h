#pragma once

#include "models/model.h"

namespace nanovllm {

/// MistralForCausalLM (transformers: models/mistral/modeling_mistral.py).
std::unique_ptr<Model> make_mistral(const ModelConfig& config, const ModelContext& context);

}  // namespace nanovllm
