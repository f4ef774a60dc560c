// Mistral: the shared decoder without biases. Its first version slides: every layer sees the last
// sliding_window tokens.
#include "models/mistral.h"

#include "models/decoder.h"

namespace nanovllm {

std::unique_ptr<Model> make_mistral(const ModelConfig& config, const ModelContext& context) {
  return std::make_unique<DecoderForCausalLM<RotaryAttention>>(config, context);
}

}  // namespace nanovllm
