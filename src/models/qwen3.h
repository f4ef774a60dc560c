#pragma once

#include "models/model.h"

namespace nanovllm {

/// Qwen3ForCausalLM, dense (transformers: models/qwen3/modeling_qwen3.py).
std::unique_ptr<Model> make_qwen3(const ModelConfig& config, const ModelContext& context);

}  // namespace nanovllm
