// config.json and generation_config.json: an accepted configuration has only sizes that the engine
// can compute with.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include <nlohmann/json.hpp>

#include "io/generation_config.h"
#include "io/model_config.h"

namespace {

using namespace nanovllm;

constexpr int64_t kVocab = 1000;
constexpr ConfigDefaults kNothing;
constexpr ConfigDefaults kEverything{.num_key_value_heads = 4,
                                     .head_dim = 128,
                                     .num_experts = 128,
                                     .eos_token_id = 2,
                                     .use_sliding_window = false,
                                     .attention_bias = false,
                                     .attention_out_bias = false,
                                     .mlp_bias = false,
                                     .sliding = SlidingLayers::by_layer,
                                     .qkv_bias = true};

void require(bool condition) {
  if (!condition) std::abort();
}

void check_config(const ModelConfig& config) {
  for (const int64_t size :
       {config.vocab_size, config.hidden_size, config.intermediate_size, config.num_hidden_layers,
        config.num_attention_heads, config.num_key_value_heads, config.head_dim,
        config.max_position_embeddings})
    require(size > 0);
  require(config.num_attention_heads % config.num_key_value_heads == 0);
  require(config.head_dim % 2 == 0);
  require(config.approximate_parameters() > 0 && config.approximate_parameters() <= int64_t{1}
                                                                                        << 40);
  require(config.layer_types.size() == static_cast<size_t>(config.num_hidden_layers));
  require(std::isfinite(config.rms_norm_eps) && config.rms_norm_eps >= 0);
  for (const int64_t id : config.eos_token_ids) require(id >= 0 && id < config.vocab_size);
  const RopeParameters& rope = config.rope;
  for (const double value :
       {rope.theta, rope.factor, rope.attention_factor, rope.beta_fast, rope.beta_slow,
        rope.low_freq_factor, rope.high_freq_factor, rope.partial_rotary_factor})
    require(std::isfinite(value) && value > 0);
  if (config.moe) require(config.moe->num_experts_per_tok <= config.moe->num_experts);
}

template <class Parse>
void refuse_or_accept(Parse&& parse) {
  try {
    parse();
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::model);
    require(std::string_view(error.what()).find('\n') == std::string_view::npos);
    require(std::string_view(error.what()).size() < 2000);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  refuse_or_accept([&] {
    const Json json = parse_json(text, "config.json", ErrorKind::model,
                                 {.max_bytes = 1 << 20, .max_nodes = 100'000});
    for (const ConfigDefaults& defaults : {kNothing, kEverything})
      refuse_or_accept([&] {
        check_config(parse_model_config(json, [&](const std::string&) { return defaults; }));
      });
    refuse_or_accept([&] {
      const GenerationConfig config = parse_generation_config(json, kVocab);
      for (const int64_t id : config.eos_token_ids) require(id >= 0 && id < kVocab);
      require(!config.temperature ||
              (std::isfinite(*config.temperature) && *config.temperature >= 0));
      require(!config.top_p || (*config.top_p >= 0 && *config.top_p <= 1));
    });
  });
  return 0;
}
