#include <fmt/ranges.h>

#include "models/model.h"
#include "models/qwen3.h"
#include "models/qwen3_moe.h"

namespace nanovllm {
namespace {

template <class M>
std::unique_ptr<Model> make(const ModelConfig& config, const ModelContext& context) {
  return std::make_unique<M>(config, context);
}

}  // namespace

// `config` is transformers' models/<family>/configuration_<family>.py.
const std::vector<Architecture>& architectures() {
  static const std::vector<Architecture> table = {
      {.name = "Qwen3ForCausalLM",
       .make = make<Qwen3ForCausalLM>,
       .config = {.num_key_value_heads = 32,
                  .head_dim = 128,
                  .max_position_embeddings = 32768,
                  .use_sliding_window = false,
                  .attention_bias = false,
                  .sliding = SlidingLayers::by_layer}},
      {.name = "Qwen3MoeForCausalLM",
       .make = make<Qwen3MoeForCausalLM>,
       .config = {.num_key_value_heads = 4,
                  .max_position_embeddings = 32768,
                  .num_experts = 128,
                  .use_sliding_window = false,
                  .attention_bias = false,
                  .sliding = SlidingLayers::all}},
      // Qwen2 and Qwen2.5: biases on query, key and value, always, and nowhere else.
      {.name = "Qwen2ForCausalLM",
       .make = make<RotaryForCausalLM>,
       .config = {.num_key_value_heads = 32,
                  .max_position_embeddings = 32768,
                  .use_sliding_window = false,
                  .sliding = SlidingLayers::by_layer,
                  .qkv_bias = true}},
      // Llama 2, 3, 3.1, 3.2 and 3.3.
      {.name = "LlamaForCausalLM",
       .make = make<RotaryForCausalLM>,
       .config = {.max_position_embeddings = 2048,
                  .bos_token_id = 1,
                  .eos_token_id = 2,
                  .attention_bias = false,
                  .mlp_bias = false}},
      // The first version slides: every layer sees the last sliding_window tokens.
      {.name = "MistralForCausalLM",
       .make = make<RotaryForCausalLM>,
       .config = {.num_key_value_heads = 8,
                  .max_position_embeddings = 131072,
                  .bos_token_id = 1,
                  .eos_token_id = 2,
                  .sliding = SlidingLayers::all}},
      {.name = "SeedOssForCausalLM",
       .make = make<RotaryForCausalLM>,
       .config = {.num_key_value_heads = 8,
                  .head_dim = 128,
                  .max_position_embeddings = 524288,
                  .bos_token_id = 0,
                  .eos_token_id = 2,
                  .attention_bias = true,
                  .attention_out_bias = false,
                  .mlp_bias = false}},
  };
  return table;
}

const Architecture& find_architecture(const std::string& name) {
  std::vector<std::string_view> known;
  for (const Architecture& entry : architectures()) {
    if (name == entry.name) return entry;
    known.emplace_back(entry.name);
  }
  fail(ErrorKind::model, "config.json: architecture {} is not supported: use {}", quote(name),
       fmt::join(known, ", "));
}

ConfigDefaults config_defaults(const std::string& architecture) {
  return find_architecture(architecture).config;
}

}  // namespace nanovllm
