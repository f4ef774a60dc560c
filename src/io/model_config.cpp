#include "io/model_config.h"

#include <algorithm>
#include <filesystem>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "core/weight.h"
#include "io/json_object.h"
#include "io/model_directory.h"
#include "io/quantised/quantization.h"

namespace nanovllm {
namespace {

constexpr int64_t kMaxElements = int64_t{1} << 40;
constexpr int64_t kMaxHidden = int64_t{1} << 20;
constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxHeads = 16384;
constexpr int64_t kMaxHeadDim = 1024;
constexpr int64_t kMaxVocab = int64_t{1} << 24;
constexpr int64_t kMaxPositions = (int64_t{1} << 31) - 1;
constexpr int64_t kMaxExperts = 65536;

char to_upper(char c) { return c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c; }

class ConfigReader {
 public:
  ConfigReader(const Json& json, std::string_view what)
      : in_(json, std::string(what), ErrorKind::model) {}

  ModelConfig read(const FindConfigDefaults& defaults) {
    out_.architecture = architecture();
    defaults_ = defaults(out_.architecture);
    refuse_other_mathematics();
    read_sizes();
    read_attention();
    read_mlp();
    read_tokens();
    check_products();
    return std::move(out_);
  }

 private:
  template <class... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    in_.refuse(fmt::format(format, std::forward<Args>(args)...));
  }

  /// A field that is read where it has a default.
  std::optional<bool> flag(const char* key, std::optional<bool> absent) const {
    return absent ? in_.optional_bool(key).value_or(*absent) : absent;
  }

  /// The first name of architectures or, as transformers finds the class, that of model_type:
  /// Qwen3MoeForCausalLM of qwen3_moe.
  std::string architecture() const {
    const auto names = in_.optional_strings("architectures");
    if (names && !names->empty()) return names->front();
    const auto type = in_.optional_string("model_type");
    if (!type) refuse("architectures is missing: expected a list of one name");
    std::string name;
    for (size_t i = 0; i < type->size(); ++i)
      if ((*type)[i] != '_')
        name += i == 0 || (*type)[i - 1] == '_' ? to_upper((*type)[i]) : (*type)[i];
    return name + "ForCausalLM";
  }

  void refuse_other_mathematics() {
    for (const char* key : {"quantization_config", "compression_config", "quantization"})
      if (const auto quantization = in_.optional_object(key); quantization && !out_.quantization)
        out_.quantization =
            std::make_shared<const QuantizationConfig>(*quantization, out_.warnings);
    if (const auto act = in_.optional_string("hidden_act");
        act && *act != "silu" && *act != "swish")
      refuse("hidden_act {} is not supported: use silu", quote(*act));
    if (in_.contains("auto_map"))
      out_.warnings.push_back(
          "config.json: auto_map is ignored: code of a model directory is never run");
    if (in_.find("dual_chunk_attention_config"))  // of Qwen's config_1m.json
      out_.warnings.push_back(
          "config.json: dual_chunk_attention_config is ignored, as in transformers: the model was "
          "trained with shorter contexts than max_position_embeddings");
    out_.dtype = dtype();
  }

  std::optional<DType> dtype() const {
    const auto one = [this](const char* key) -> std::optional<DType> {
      auto name = in_.optional_string(key);
      if (!name) return std::nullopt;
      if (name->starts_with("torch.")) name->erase(0, 6);
      if (*name == "float32") return DType::f32;
      if (*name == "float16") return DType::f16;
      if (*name == "bfloat16") return DType::bf16;
      refuse("{} {} is not supported: use bfloat16, float16 or float32", key, quote(*name));
    };
    const auto now = one("dtype");
    return now ? now : one("torch_dtype");  // of transformers 4
  }

  void read_sizes() {
    out_.vocab_size = in_.integer("vocab_size", 1, kMaxVocab);
    out_.hidden_size = in_.integer("hidden_size", 1, kMaxHidden);
    out_.intermediate_size = in_.integer("intermediate_size", 1, kMaxHidden);
    out_.num_hidden_layers = in_.integer("num_hidden_layers", 1, kMaxLayers);
    out_.max_position_embeddings = in_.optional_integer("max_position_embeddings", 1, kMaxPositions)
                                       .value_or(defaults_.max_position_embeddings);
    out_.rms_norm_eps = in_.optional_number("rms_norm_eps").value_or(out_.rms_norm_eps);
    if (out_.rms_norm_eps < 0 || out_.rms_norm_eps > 1)
      refuse("rms_norm_eps must be from 0 to 1, got {}", out_.rms_norm_eps);
    out_.tie_word_embeddings = in_.optional_bool("tie_word_embeddings").value_or(false);
  }

  void read_attention() {
    const int64_t heads = out_.num_attention_heads =
        in_.integer("num_attention_heads", 1, kMaxHeads);
    // Absent means the class's default, null means one per attention head.
    const int64_t absent = in_.contains("num_key_value_heads") ? 0 : defaults_.num_key_value_heads;
    const int64_t kv_heads = out_.num_key_value_heads =
        in_.optional_integer("num_key_value_heads", 1, kMaxHeads)
            .value_or(absent > 0 ? absent : heads);
    if (heads % kv_heads != 0)
      refuse("num_attention_heads is {}, not divisible by num_key_value_heads {}", heads, kv_heads);

    if (const auto head_dim = in_.optional_integer("head_dim", 1, kMaxHeadDim))
      out_.head_dim = *head_dim;
    else if (defaults_.head_dim > 0 && !in_.contains("head_dim"))
      out_.head_dim = defaults_.head_dim;
    else if (out_.hidden_size % heads == 0)
      out_.head_dim = out_.hidden_size / heads;
    else
      refuse("hidden_size is {}, not divisible by num_attention_heads {}, and head_dim is missing",
             out_.hidden_size, heads);
    if (out_.head_dim % 2 != 0 || out_.head_dim > kMaxHeadDim)
      refuse("head_dim is {}, must be even and at most {}", out_.head_dim, kMaxHeadDim);

    out_.rope = read_rope_parameters(in_, out_.max_position_embeddings, out_.warnings);
    if (out_.rope.partial_rotary_factor != 1)
      refuse("partial_rotary_factor {} is not supported for {}: it rotates whole heads",
             out_.rope.partial_rotary_factor, out_.architecture);

    const auto bias = flag("attention_bias", defaults_.attention_bias);
    out_.qkv_bias = defaults_.qkv_bias || bias.value_or(false);
    out_.output_bias =
        flag("attention_out_bias", defaults_.attention_out_bias).value_or(bias.value_or(false));
    read_window();
  }

  /// The window that the architecture's code would use, 0 for none.
  int64_t window_size() const {
    if (defaults_.sliding == SlidingLayers::none) return 0;
    if (!flag("use_sliding_window", defaults_.use_sliding_window).value_or(true)) return 0;
    const int64_t absent = in_.contains("sliding_window") ? 0 : defaults_.sliding_window;
    return in_.optional_integer("sliding_window", 1, kMaxPositions).value_or(absent);
  }

  void read_window() {
    const int64_t window = window_size();
    const auto layers = static_cast<size_t>(out_.num_hidden_layers);
    const int64_t first_sliding =
        defaults_.sliding == SlidingLayers::by_layer
            ? in_.optional_integer("max_window_layers", 0, kMaxPositions).value_or(28)
            : 0;
    out_.layer_types.assign(layers, AttentionType::full);
    if (window > 0)
      for (size_t i = 0; i < layers; ++i)
        if (static_cast<int64_t>(i) >= first_sliding) out_.layer_types[i] = AttentionType::sliding;

    if (const auto given = read_layer_types()) {
      if (defaults_.sliding != SlidingLayers::by_layer && *given != out_.layer_types)
        refuse("layer_types differ from what {} does with sliding_window {}", out_.architecture,
               window);
      out_.layer_types = *given;
    }
    const bool slides = std::find(out_.layer_types.begin(), out_.layer_types.end(),
                                  AttentionType::sliding) != out_.layer_types.end();
    if (slides && window == 0)
      refuse("layer_types names sliding_attention, but sliding_window is not set");
    out_.sliding_window = slides ? window : 0;
  }

  std::optional<std::vector<AttentionType>> read_layer_types() const {
    const auto names = in_.optional_strings("layer_types");
    if (!names) return std::nullopt;
    if (names->size() != static_cast<size_t>(out_.num_hidden_layers))
      refuse("layer_types has {} entries, num_hidden_layers is {}", names->size(),
             out_.num_hidden_layers);
    std::vector<AttentionType> types;
    types.reserve(names->size());
    for (const std::string& name : *names) {
      if (name != "full_attention" && name != "sliding_attention")
        refuse("layer_types: {} is not supported: use full_attention or sliding_attention",
               quote(name));
      types.push_back(name == "full_attention" ? AttentionType::full : AttentionType::sliding);
    }
    return types;
  }

  void read_mlp() {
    out_.mlp_bias = flag("mlp_bias", defaults_.mlp_bias).value_or(false);
    // transformers 5 writes num_local_experts for what it used to call num_experts.
    auto experts = in_.optional_integer("num_experts", 0, kMaxExperts);
    const auto local = in_.optional_integer("num_local_experts", 0, kMaxExperts);
    if (experts && local && *experts != *local)
      refuse("num_experts is {}, but num_local_experts is {}", *experts, *local);
    if (!experts) experts = local;
    if (defaults_.num_experts == 0 || experts == 0) return;

    MoeConfig moe;
    moe.num_experts = experts.value_or(defaults_.num_experts);
    moe.num_experts_per_tok =
        in_.optional_integer("num_experts_per_tok", 1, kMaxExperts).value_or(8);
    if (moe.num_experts_per_tok > moe.num_experts)
      refuse("num_experts_per_tok is {}, more than num_experts {}", moe.num_experts_per_tok,
             moe.num_experts);
    moe.moe_intermediate_size =
        in_.optional_integer("moe_intermediate_size", 1, kMaxHidden).value_or(768);
    moe.norm_topk_prob = in_.optional_bool("norm_topk_prob").value_or(false);
    moe.decoder_sparse_step =
        in_.optional_integer("decoder_sparse_step", 1, kMaxLayers).value_or(1);
    if (const auto dense = in_.optional_integers("mlp_only_layers", 0, kMaxLayers))
      moe.mlp_only_layers = *dense;
    if (moe.mlp_only_layers.size() > static_cast<size_t>(kMaxLayers))
      refuse("mlp_only_layers has {} entries, more than {}", moe.mlp_only_layers.size(),
             kMaxLayers);
    out_.moe = std::move(moe);
  }

  void read_tokens() {
    const auto eos = in_.optional_integers("eos_token_id", 0, out_.vocab_size - 1);
    if (eos)
      out_.eos_token_ids = *eos;
    else if (!in_.contains("eos_token_id") && defaults_.eos_token_id)
      out_.eos_token_ids = {*defaults_.eos_token_id};
    out_.bos_token_id = unused_id("bos_token_id", defaults_.bos_token_id);
    out_.pad_token_id = unused_id("pad_token_id", std::nullopt);
  }

  /// The engine never feeds these by itself; files with -1 or an id beyond the vocabulary are
  /// common and harmless.
  std::optional<int64_t> unused_id(const char* key, std::optional<int64_t> absent) {
    if (!in_.contains(key)) return absent;
    const Json* value = in_.find(key);
    if (!value) return std::nullopt;
    const auto ids = in_.optional_integers(key, -kMaxPositions, kMaxPositions);
    if (ids && ids->size() == 1 && ids->front() >= 0 && ids->front() < out_.vocab_size)
      return ids->front();
    out_.warnings.push_back(fmt::format(
        "config.json: {} {} is outside the vocabulary and is ignored", key, describe(*value)));
    return std::nullopt;
  }

  void check_products() const {
    const auto product = [this](const char* what, int64_t a, int64_t b) {
      if (a > kMaxElements / b) refuse("{} is {} x {}, more than 2^40", what, a, b);
    };
    product("vocab_size x hidden_size", out_.vocab_size, out_.hidden_size);
    product("hidden_size x intermediate_size", out_.hidden_size, out_.intermediate_size);
    product("attention width x hidden_size", out_.num_attention_heads * out_.head_dim,
            out_.hidden_size);
    const int64_t experts = out_.moe ? out_.moe->num_experts : 1;
    if (out_.moe) {
      product("hidden_size x moe_intermediate_size", out_.hidden_size,
              out_.moe->moe_intermediate_size);
      product("experts x expert size", out_.hidden_size * out_.moe->moe_intermediate_size, experts);
    }
    product("KV cache of one token", 2 * out_.num_hidden_layers * out_.num_key_value_heads,
            out_.head_dim);
    if (out_.approximate_parameters() > kMaxElements)
      refuse("the sizes make a model of {} parameters, more than 2^40",
             out_.approximate_parameters());
  }

  JsonObject in_;
  ConfigDefaults defaults_;
  ModelConfig out_;
};

}  // namespace

bool MoeConfig::is_sparse(int64_t index) const {
  return (index + 1) % decoder_sparse_step == 0 &&
         std::find(mlp_only_layers.begin(), mlp_only_layers.end(), index) == mlp_only_layers.end();
}

int64_t ModelConfig::longest_context() const {
  if (rope.type != RopeType::yarn) return max_position_embeddings;
  const double stretched = rope.factor * static_cast<double>(rope.original_max_position_embeddings);
  return std::max(max_position_embeddings,
                  static_cast<int64_t>(std::min(stretched, static_cast<double>(kMaxPositions))));
}

int64_t ModelConfig::window(int64_t index) const {
  const auto i = static_cast<size_t>(index);  // configurations made by hand may name no types
  return i < layer_types.size() && layer_types[i] == AttentionType::sliding ? sliding_window : 0;
}

bool ModelConfig::is_in_halves() const {
  return !moe && !output_bias && !mlp_bias &&
         multiplies_in_halves(hidden_size, num_attention_heads * head_dim) &&
         multiplies_in_halves(hidden_size, intermediate_size);
}

int64_t ModelConfig::approximate_parameters() const {
  const int64_t attention =
      hidden_size * head_dim * 2 * (num_attention_heads + num_key_value_heads);
  const int64_t dense = 3 * hidden_size * intermediate_size;
  const int64_t sparse =
      moe ? moe->num_experts * hidden_size * (3 * moe->moe_intermediate_size + 1) : 0;
  int64_t total = vocab_size * hidden_size * (tie_word_embeddings ? 1 : 2);
  for (int64_t i = 0; i < num_hidden_layers; ++i)
    total += attention + (moe && moe->is_sparse(i) ? sparse : dense);
  return total;
}

ModelConfig parse_model_config(const Json& json, const FindConfigDefaults& defaults,
                               std::string_view what) {
  return ConfigReader(json, what).read(defaults);
}

ModelConfig load_model_config(const std::string& directory, const FindConfigDefaults& defaults) {
  check_model_directory(directory);
  namespace fs = std::filesystem;
  const fs::path path = fs::path(directory) / "config.json";
  std::error_code error;
  const bool has_config = fs::exists(path, error);
  check(!error, ErrorKind::model, "{}: cannot be read: {}", path.string(), error.message());
  const auto has = [&](const char* name) { return fs::exists(path.parent_path() / name, error); };
  check(has_config, ErrorKind::model, "{}: no config.json: not a Hugging Face model directory{}",
        directory,
        has("snapshots")             ? "; give one of those in its snapshots, or the model's name"
        : has("adapter_config.json") ? "; an adapter (LoRA) is merged into its model first"
                                     : "");
  // AutoRound's extra_config may have an object for each expert's weights.
  const JsonLimits limits{.max_bytes = size_t{16} << 20, .max_nodes = 1'000'000};
  Json json = read_json_file(path.string(), limits);
  // NVIDIA's checkpoints of 2024 have it in a file of its own.
  const fs::path modelopt = fs::path(directory) / "hf_quant_config.json";
  if (json.is_object() && !json.contains("quantization_config") && fs::exists(modelopt, error)) {
    Json quantization = read_json_file(modelopt.string(), limits);
    if (quantization.is_object() && quantization.contains("quantization"))
      quantization = Json(quantization["quantization"]);
    if (quantization.is_object()) quantization["quant_method"] = "modelopt";
    json["quantization_config"] = std::move(quantization);
  }
  return parse_model_config(json, defaults, path.string());
}

}  // namespace nanovllm
