#pragma once

#include "models/model.h"

namespace nanovllm {

/// Qwen3MoeForCausalLM (transformers: models/qwen3_moe/modeling_qwen3_moe.py).
std::unique_ptr<Model> make_qwen3_moe(const ModelConfig& config, const ModelContext& context);

}  // namespace nanovllm
