#pragma once

#include "models/model.h"

namespace nanovllm {

/// Qwen2ForCausalLM (transformers: models/qwen2/modeling_qwen2.py).
std::unique_ptr<Model> make_qwen2(const ModelConfig& config, const ModelContext& context);

}  // namespace nanovllm
