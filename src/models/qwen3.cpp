// Qwen3: the shared decoder with attention of its own.
#include "models/qwen3.h"

#include "models/qwen3_attention.h"

namespace nanovllm {

std::unique_ptr<Model> make_qwen3(const ModelConfig& config, const ModelContext& context) {
  return std::make_unique<DecoderForCausalLM<Qwen3Attention>>(config, context);
}

}  // namespace nanovllm
