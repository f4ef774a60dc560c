// Shared by tests of loading: small models, checkpoints whose every element has a value of its
// own, and a device that keeps what is loaded.
#pragma once

#include <algorithm>
#include <map>

#include <gtest/gtest.h>

#include "io/safetensors/checkpoint.h"
#include "models/model.h"
#include "ops/null_backend.h"
#include "unit/io/tensor_file.h"
#include "unit/temp_directory.h"
#include "weights/weight_loader.h"

namespace nanovllm {

/// Keeps what is loaded as plain rows of f32, in the order of the layers' constructors.
class RecordingBackend : public NullBackend {
 public:
  struct Loaded {
    std::vector<float> values;
    std::vector<int64_t> shape;
    bool operator==(const Loaded&) const = default;
  };
  std::vector<Loaded> loaded;

  void load(Tensor dst, std::span<const Tensor> parts) override {
    Loaded out;
    out.shape.assign(dst.shape.begin(), dst.shape.begin() + dst.rank);
    for (const Tensor& part : parts) {
      const int64_t columns = part.rank > 1 ? part.shape[1] : 1;
      for (int64_t row = 0; row < part.shape[0]; ++row)
        for (int64_t column = 0; column < columns; ++column)
          out.values.push_back(element(part, row * part.stride[0] + column));
    }
    EXPECT_EQ(std::ssize(out.values), dst.numel());
    loaded.push_back(std::move(out));
  }

 private:
  static float element(const Tensor& t, int64_t i) {
    return t.dtype == DType::bf16 ? static_cast<float>(t.ptr<bf16>()[i]) : t.ptr<float>()[i];
  }
};

/// A model with every kind of weight, whose sizes 2, 4 and 8 ranks divide; 2 KV heads.
inline ModelConfig small_model() {
  ModelConfig c;
  c.architecture = "Qwen3ForCausalLM";
  c.vocab_size = 24;
  c.hidden_size = 6;
  c.intermediate_size = 16;
  c.num_hidden_layers = 2;
  c.num_attention_heads = 8;
  c.num_key_value_heads = 2;
  c.head_dim = 4;
  c.max_position_embeddings = 64;
  c.qkv_bias = c.output_bias = c.mlp_bias = true;
  return c;
}

/// The same without biases, and with four experts in the second layer.
inline ModelConfig small_mixture() {
  ModelConfig c = small_model();
  c.architecture = "Qwen3MoeForCausalLM";
  c.qkv_bias = c.output_bias = c.mlp_bias = false;
  c.moe = MoeConfig{.num_experts = 4,
                    .num_experts_per_tok = 2,
                    .moe_intermediate_size = 8,
                    .decoder_sparse_step = 2,
                    .mlp_only_layers = {}};
  return c;
}

using Shapes = std::vector<std::pair<std::string, std::vector<int64_t>>>;

/// The tensors of such a checkpoint, as transformers names them.
inline Shapes shapes_of(const ModelConfig& c) {
  const int64_t q = c.num_attention_heads * c.head_dim, kv = c.num_key_value_heads * c.head_dim;
  Shapes shapes = {{"model.embed_tokens.weight", {c.vocab_size, c.hidden_size}}};
  for (int64_t i = 0; i < c.num_hidden_layers; ++i) {
    const std::string layer = "model.layers." + std::to_string(i) + ".",
                      attention = layer + "self_attn.";
    shapes.insert(shapes.end(),
                  {{layer + "input_layernorm.weight", {c.hidden_size}},
                   {attention + "q_proj.weight", {q, c.hidden_size}},
                   {attention + "k_proj.weight", {kv, c.hidden_size}},
                   {attention + "v_proj.weight", {kv, c.hidden_size}},
                   {attention + "q_proj.bias", {q}},
                   {attention + "k_proj.bias", {kv}},
                   {attention + "v_proj.bias", {kv}},
                   {attention + "o_proj.weight", {c.hidden_size, q}},
                   {attention + "o_proj.bias", {c.hidden_size}},
                   {attention + "q_norm.weight", {c.head_dim}},
                   {attention + "k_norm.weight", {c.head_dim}},
                   {layer + "post_attention_layernorm.weight", {c.hidden_size}},
                   {layer + "mlp.gate_proj.weight", {c.intermediate_size, c.hidden_size}},
                   {layer + "mlp.up_proj.weight", {c.intermediate_size, c.hidden_size}},
                   {layer + "mlp.down_proj.weight", {c.hidden_size, c.intermediate_size}},
                   {layer + "mlp.gate_proj.bias", {c.intermediate_size}},
                   {layer + "mlp.up_proj.bias", {c.intermediate_size}},
                   {layer + "mlp.down_proj.bias", {c.hidden_size}}});
  }
  shapes.push_back({"model.norm.weight", {c.hidden_size}});
  shapes.push_back({"lm_head.weight", {c.vocab_size, c.hidden_size}});
  return shapes;
}

/// Every element of a checkpoint has a value of its own.
class Weights {
 public:
  explicit Weights(const Shapes& shapes) {
    float next = 1;
    for (const auto& [name, shape] : shapes) {
      auto& values = values_[name];
      const int64_t count = shape[0] * (shape.size() > 1 ? shape[1] : 1);
      for (int64_t i = 0; i < count; ++i) values.push_back(next++);
      StoredBytes bytes{name, "F32", std::string(values.size() * 4, ' '), shape};
      std::memcpy(bytes.bytes.data(), values.data(), bytes.bytes.size());
      tensors.push_back(std::move(bytes));
      shapes_[name] = shape;
    }
  }
  /// Rows [row, row + rows) and columns [column, column + columns); 0 columns: all of them.
  std::vector<float> part(const std::string& name, int64_t row, int64_t rows, int64_t column = 0,
                          int64_t columns = 0) const {
    const auto& shape = shapes_.at(name);
    const int64_t width = shape.size() > 1 ? shape[1] : 1;
    std::vector<float> out;
    for (int64_t i = row; i < row + rows; ++i)
      for (int64_t j = column; j < column + (columns ? columns : width); ++j)
        out.push_back(values_.at(name)[static_cast<size_t>(i * width + j)]);
    return out;
  }
  std::vector<float> all(const std::string& name) const { return values_.at(name); }

  std::vector<StoredBytes> tensors;

 private:
  std::map<std::string, std::vector<float>> values_;
  std::map<std::string, std::vector<int64_t>> shapes_;
};

inline std::vector<float> stacked(std::initializer_list<std::vector<float>> parts) {
  std::vector<float> out;
  for (const auto& part : parts) out.insert(out.end(), part.begin(), part.end());
  return out;
}

inline std::vector<RecordingBackend::Loaded> load_shard(const ModelConfig& config,
                                                        const Checkpoint& checkpoint, Shard shard) {
  RecordingBackend backend;
  const QuantizationConfig* quantization = config.quantization.get();
  WeightLoader counter(backend, DType::f32, shard, nullptr, quantization);
  find_architecture(config.architecture).make(config, {counter, {}});
  std::vector<std::byte> storage(counter.bytes());
  WeightLoader loader(backend, DType::f32, shard, storage.data(), quantization);
  find_architecture(config.architecture).make(config, {loader, {}});
  EXPECT_EQ(loader.bytes(), counter.bytes());
  loader.load(checkpoint, {});
  int64_t elements = 0;
  for (const auto& tensor : backend.loaded) elements += std::ssize(tensor.values);
  EXPECT_EQ(elements, counter.num_parameters());
  return backend.loaded;
}

/// A mixture's checkpoint in place of its second layer's dense MLP.
inline Shapes mixture_shapes(const ModelConfig& c) {
  Shapes shapes = shapes_of(c);
  std::erase_if(shapes, [](const auto& entry) {
    return entry.first.ends_with(".bias") || entry.first.starts_with("model.layers.1.mlp.");
  });
  const std::string mlp = "model.layers.1.mlp.";
  const int64_t inner = c.moe->moe_intermediate_size;
  shapes.push_back({mlp + "gate.weight", {c.moe->num_experts, c.hidden_size}});
  for (int64_t e = 0; e < c.moe->num_experts; ++e) {
    const std::string expert = mlp + "experts." + std::to_string(e) + ".";
    shapes.insert(shapes.end(), {{expert + "gate_proj.weight", {inner, c.hidden_size}},
                                 {expert + "up_proj.weight", {inner, c.hidden_size}},
                                 {expert + "down_proj.weight", {c.hidden_size, inner}}});
  }
  return shapes;
}

class WeightLoaderTest : public testing::Test {
 protected:
  void write(const std::vector<StoredBytes>& tensors) {
    write_tensors(directory_.path() / "model.safetensors", tensors);
  }
  Checkpoint checkpoint() const { return Checkpoint(directory_.path().string()); }

  ModelConfig config_ = small_model();
  Weights weights_{shapes_of(small_model())};
  TempDirectory directory_;
};

}  // namespace nanovllm
