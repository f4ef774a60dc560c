// Llama 2, 3, 3.1, 3.2 and 3.3: the shared decoder, with biases on all of attention
// (attention_bias) and all of the MLP (mlp_bias) where config.json asks for them. 3.1 and later
// stretch RoPE (rope type llama3).
#include "models/llama.h"

#include "models/decoder.h"

namespace nanovllm {

std::unique_ptr<Model> make_llama(const ModelConfig& config, const ModelContext& context) {
  return std::make_unique<DecoderForCausalLM<RotaryAttention>>(config, context);
}

}  // namespace nanovllm
