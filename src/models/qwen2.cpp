// Qwen2 and Qwen2.5: the shared decoder with biases on q, k and v, always, and nowhere else.
#include "models/qwen2.h"

#include "models/decoder.h"

namespace nanovllm {

std::unique_ptr<Model> make_qwen2(const ModelConfig& config, const ModelContext& context) {
  return std::make_unique<DecoderForCausalLM<RotaryAttention>>(config, context);
}

}  // namespace nanovllm
