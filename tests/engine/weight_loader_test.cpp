#include "layers/weight_loader.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include <gtest/gtest.h>

#include "io/checkpoint.h"
#include "layers/embed_head.h"
#include "layers/linear.h"
#include "models/model.h"
#include "ops/null_backend.h"
#include "unit/temp_directory.h"
#include "unit/tensor_file.h"

namespace nanovllm {
namespace {

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
          out.values.push_back(part.ptr<float>()[row * part.stride[0] + column]);
    }
    EXPECT_EQ(std::ssize(out.values), dst.numel());
    loaded.push_back(std::move(out));
  }
};

/// A model with every kind of weight, whose sizes 2, 4 and 8 ranks divide; 2 KV heads.
ModelConfig small_model() {
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
ModelConfig small_mixture() {
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
Shapes shapes_of(const ModelConfig& c) {
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

std::vector<float> stacked(std::initializer_list<std::vector<float>> parts) {
  std::vector<float> out;
  for (const auto& part : parts) out.insert(out.end(), part.begin(), part.end());
  return out;
}

std::vector<RecordingBackend::Loaded> load_shard(const ModelConfig& config,
                                                 const Checkpoint& checkpoint, Shard shard) {
  RecordingBackend backend;
  WeightLoader counter(backend, DType::f32, shard);
  find_architecture(config).make(config, {counter, {}});
  std::vector<std::byte> storage(counter.bytes());
  WeightLoader loader(backend, DType::f32, shard, storage.data());
  find_architecture(config).make(config, {loader, {}});
  EXPECT_EQ(loader.bytes(), counter.bytes());
  loader.load(checkpoint, {});
  int64_t elements = 0;
  for (const auto& tensor : backend.loaded) elements += std::ssize(tensor.values);
  EXPECT_EQ(elements, counter.num_parameters());
  return backend.loaded;
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

// nano-vLLM's layers (nanovllm/layers/linear.py, embed_head.py): heads and rows of the
// column-parallel weights, columns of the row-parallel ones, rows of the vocabulary; norms whole.
// vLLM's for KV heads that are fewer than the ranks: each is held by a run of ranks.
TEST_F(WeightLoaderTest, EveryRankHoldsItsRowsColumnsAndHeads) {
  write(weights_.tensors);
  const Checkpoint file = checkpoint();
  for (const int world : {1, 2, 4, 8}) {
    for (int rank = 0; rank < world; ++rank) {
      SCOPED_TRACE(testing::Message() << "rank " << rank << " of " << world);
      const int64_t vocab = 24 / world, q = 8 / world * 4, inner = 16 / world;
      const int64_t kv = std::max(1, 2 / world) * 4,
                    kv_head = world <= 2 ? rank * (2 / world) : rank / (world / 2);
      const auto& w = weights_;
      std::vector<std::vector<float>> expected = {
          w.part("model.embed_tokens.weight", rank * vocab, vocab)};
      for (const std::string layer : {"model.layers.0.", "model.layers.1."}) {
        const std::string attention = layer + "self_attn.", mlp = layer + "mlp.";
        const auto qkv = [&](const std::string& what) {
          return stacked({w.part(attention + "q_proj." + what, rank * q, q),
                          w.part(attention + "k_proj." + what, kv_head * 4, kv),
                          w.part(attention + "v_proj." + what, kv_head * 4, kv)});
        };
        expected.push_back(w.all(layer + "input_layernorm.weight"));
        expected.push_back(qkv("weight"));
        expected.push_back(qkv("bias"));
        expected.push_back(w.part(attention + "o_proj.weight", 0, 6, rank * q, q));
        if (rank == 0) expected.push_back(w.all(attention + "o_proj.bias"));
        expected.push_back(w.all(attention + "q_norm.weight"));
        expected.push_back(w.all(attention + "k_norm.weight"));
        expected.push_back(w.all(layer + "post_attention_layernorm.weight"));
        for (const std::string what : {"weight", "bias"})
          expected.push_back(stacked({w.part(mlp + "gate_proj." + what, rank * inner, inner),
                                      w.part(mlp + "up_proj." + what, rank * inner, inner)}));
        expected.push_back(w.part(mlp + "down_proj.weight", 0, 6, rank * inner, inner));
        if (rank == 0) expected.push_back(w.all(mlp + "down_proj.bias"));
      }
      expected.push_back(w.all("model.norm.weight"));
      expected.push_back(w.part("lm_head.weight", rank * vocab, vocab));
      const auto loaded = load_shard(config_, file, {rank, world});
      ASSERT_EQ(loaded.size(), expected.size());
      for (size_t i = 0; i < loaded.size(); ++i)
        EXPECT_EQ(loaded[i].values, expected[i]) << "parameter " << i;
    }
  }
}

/// A mixture's checkpoint in place of its second layer's dense MLP.
Shapes mixture_shapes(const ModelConfig& c) {
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

// As vLLM shards experts without expert parallelism (vllm FusedMoE): every rank has a slice of
// every expert, and the router is whole.
TEST_F(WeightLoaderTest, EveryRankHoldsItsSliceOfEveryExpert) {
  const ModelConfig config = small_mixture();
  const Weights w(mixture_shapes(config));
  write(w.tensors);
  const Checkpoint file = checkpoint();
  for (const int world : {1, 2, 4})
    for (int rank = 0; rank < world; ++rank) {
      SCOPED_TRACE(testing::Message() << "rank " << rank << " of " << world);
      const int64_t dense = 16 / world, inner = 8 / world;
      std::vector<std::vector<float>> expected = {
          stacked({w.part("model.layers.0.mlp.gate_proj.weight", rank * dense, dense),
                   w.part("model.layers.0.mlp.up_proj.weight", rank * dense, dense)}),
          w.part("model.layers.0.mlp.down_proj.weight", 0, 6, rank * dense, dense),
          w.all("model.layers.1.mlp.gate.weight")};
      for (const std::string e : {"0", "1", "2", "3"}) {
        const std::string expert = "model.layers.1.mlp.experts." + e + ".";
        expected.push_back(stacked({w.part(expert + "gate_proj.weight", rank * inner, inner),
                                    w.part(expert + "up_proj.weight", rank * inner, inner)}));
      }
      for (const std::string e : {"0", "1", "2", "3"})
        expected.push_back(w.part("model.layers.1.mlp.experts." + e + ".down_proj.weight", 0, 6,
                                  rank * inner, inner));
      auto loaded = load_shard(config, file, {rank, world});
      // The embedding, and of both layers the norms and attention: as in a dense model.
      ASSERT_EQ(loaded.size(), 1 + 2 * 6 + expected.size() + 2);
      std::vector<RecordingBackend::Loaded> mlps(loaded.begin() + 7, loaded.begin() + 9);
      mlps.insert(mlps.end(), loaded.begin() + 15, loaded.end() - 2);
      ASSERT_EQ(mlps.size(), expected.size());
      for (size_t i = 0; i < mlps.size(); ++i)
        EXPECT_EQ(mlps[i].values, expected[i]) << "parameter " << i;
    }
}

TEST_F(WeightLoaderTest, ExpertsThatDoNotFitOrAreMissingAreNamed) {
  ModelConfig config = small_mixture();
  const Weights w(mixture_shapes(config));
  const auto message = [&](int world) -> std::string {
    try {
      load_shard(config, checkpoint(), {0, world});
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  auto tensors = w.tensors;
  const std::string gone = "model.layers.1.mlp.experts.2.up_proj.weight";
  std::erase_if(tensors, [&](const StoredBytes& t) { return t.name == gone; });
  write(tensors);
  EXPECT_NE(message(1).find("lacks tensor " + gone), std::string::npos) << message(1);
  write(w.tensors);
  config.moe->num_experts = 3;  // the fourth is left over
  EXPECT_NE(message(1).find("model.layers.1.mlp.gate.weight has shape [4, 6]"), std::string::npos);
  config.moe->num_experts = 4;
  config.moe->moe_intermediate_size = 6;
  EXPECT_EQ(message(4), "tensor_parallel_size 4 does not divide moe_intermediate_size (6)");
}

TEST_F(WeightLoaderTest, RanksThatDoNotFitAreRefusedWithTheNumbers) {
  write(weights_.tensors);
  const Checkpoint file = checkpoint();
  const auto message = [&](ModelConfig config, int world) -> std::string {
    try {
      load_shard(config, file, {0, world});
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message(config_, 3), "tensor_parallel_size 3 does not divide num_attention_heads (8)");
  ModelConfig odd = config_;
  odd.num_attention_heads = 12;
  odd.num_key_value_heads = 4;
  EXPECT_EQ(message(odd, 6),
            "tensor_parallel_size 6 does not fit num_key_value_heads 4: one must divide the other");
  ModelConfig inner = config_;
  inner.intermediate_size = 18;
  EXPECT_EQ(message(inner, 4),
            "tensor_parallel_size 4 does not divide model.layers.0.mlp.gate_proj (18)");
}

// 24 rows on 16 ranks: two each, and nothing but zeros from rank 12 on. On 5: the last has 4 of 5.
TEST_F(WeightLoaderTest, AVocabularyThatTheRanksDoNotDivideEndsInZeros) {
  const auto ends_of = [&](int rank, int world, int64_t begin, int64_t rows, int64_t padding) {
    SCOPED_TRACE(testing::Message() << "rank " << rank << " of " << world);
    RecordingBackend backend;
    std::vector<std::byte> storage(1 << 16);
    WeightLoader loader(backend, DType::f32, {rank, world}, storage.data());
    const VocabParallelEmbedding embedding(loader, "model.embed_tokens.weight", 24, 6);
    auto only = weights_.tensors;
    std::erase_if(only, [](const auto& t) { return t.name != "model.embed_tokens.weight"; });
    write(only);
    loader.load(checkpoint(), {});
    std::vector<float> expected = weights_.part("model.embed_tokens.weight", begin, rows);
    expected.resize(expected.size() + static_cast<size_t>(padding * 6));
    ASSERT_EQ(backend.loaded.size(), 1u);
    EXPECT_EQ(backend.loaded[0].shape, (std::vector<int64_t>{rows + padding, 6}));
    EXPECT_EQ(backend.loaded[0].values, expected);
  };
  ends_of(0, 5, 0, 5, 0);
  ends_of(4, 5, 20, 4, 1);
  ends_of(11, 16, 22, 2, 0);
  ends_of(12, 16, 24, 0, 2);
  ends_of(15, 16, 24, 0, 2);
}

TEST_F(WeightLoaderTest, ATiedCheckpointMayCarryItsHead) {
  ModelConfig tied = config_;
  tied.tie_word_embeddings = true;
  write(weights_.tensors);
  const auto with_head = load_shard(tied, checkpoint(), {});
  auto without = weights_.tensors;
  std::erase_if(without, [](const StoredBytes& t) { return t.name == "lm_head.weight"; });
  write(without);
  EXPECT_EQ(load_shard(tied, checkpoint(), {}), with_head);
}

// Checkpoints of Llama 2's days; transformers passes over these as well.
TEST_F(WeightLoaderTest, OldCheckpointsMayCarryRotaryBuffers) {
  auto tensors = weights_.tensors;
  std::erase_if(tensors, [](const StoredBytes& t) {
    return t.name.ends_with("q_norm.weight") || t.name.ends_with("k_norm.weight");
  });
  for (const char* name : {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"}) {
    config_.architecture = name;
    write(tensors);
    const auto without = load_shard(config_, checkpoint(), {});
    auto with_buffers = tensors;
    for (const char* layer : {"0", "1"})
      with_buffers.push_back({fmt::format("model.layers.{}.self_attn.rotary_emb.inv_freq", layer),
                              "F32",
                              std::string(8, ' '),
                              {2}});
    write(with_buffers);
    EXPECT_EQ(load_shard(config_, checkpoint(), {}), without) << name;
  }
}

// The loader is exhaustive both ways.
TEST_F(WeightLoaderTest, WhatIsMissingOrTooMuchOrOfAnotherKindIsNamed) {
  struct Row {
    std::function<void(std::vector<StoredBytes>&)> change;
    std::vector<std::string> named;
  };
  const std::string name = "model.layers.1.self_attn.k_proj.weight";
  const auto at = [&](std::vector<StoredBytes>& tensors) -> StoredBytes& {
    return *std::ranges::find(tensors, name, &StoredBytes::name);
  };
  const std::vector<Row> rows = {
      {[&](auto& t) { std::erase_if(t, [&](const StoredBytes& x) { return x.name == name; }); },
       {"lacks", name}},
      {[&](auto& t) {
         t.push_back(at(t)), t.back().name = "model.layers.2.input_layernorm.weight";
       },
       {"model.layers.2.input_layernorm.weight has no place"}},
      {[&](auto& t) {
         at(t).shape = {6, 8};
       },
       {name, "[6, 8]", "[8, 6]"}},
      {[&](auto& t) { at(t).shape = {48}; }, {name, "[48]", "[8, 6]"}},
      {[&](auto& t) { at(t).dtype = "I32"; }, {name, "I32", "BF16"}},
      {[&](auto& t) { at(t).dtype = "I64", at(t).bytes += at(t).bytes; }, {name, "I64", "BF16"}},
      {[&](auto& t) { at(t).dtype = "F8_E4M3", at(t).bytes.resize(48); },
       {name, "F8_E4M3", "BF16"}},
  };
  for (const Row& row : rows) {
    auto tensors = weights_.tensors;
    row.change(tensors);
    write(tensors);
    try {
      load_shard(config_, checkpoint(), {});
      ADD_FAILURE() << row.named.front();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::model);
      for (const std::string& fragment : row.named)
        EXPECT_NE(std::string(error.what()).find(fragment), std::string::npos)
            << fragment << ": " << error.what();
    }
  }
}

TEST_F(WeightLoaderTest, ProgressRisesToTheTotal) {
  write(weights_.tensors);
  RecordingBackend backend;
  std::vector<std::byte> storage(1 << 20);
  WeightLoader loader(backend, DType::f32, {}, storage.data());
  find_architecture(config_).make(config_, {loader, {}});
  int64_t last = 0, end = 0;
  loader.load(checkpoint(), [&](int64_t done, int64_t total) {
    EXPECT_GT(done, last);
    last = done;
    end = total;
  });
  EXPECT_EQ(last, end);
}

TEST_F(WeightLoaderTest, RandomWeightsAreTheSeedsAndOfTheRightSpread) {
  const auto draw = [&](uint64_t seed) {
    RecordingBackend backend;
    std::vector<std::byte> storage(1 << 20);
    WeightLoader loader(backend, DType::f32, {}, storage.data());
    find_architecture(config_).make(config_, {loader, {}});
    loader.load_dummy(seed, {});
    return backend.loaded;
  };
  const auto first = draw(1);
  EXPECT_EQ(draw(1), first);
  EXPECT_NE(draw(2), first);
  double sum = 0, squares = 0, count = 0;
  for (const auto& tensor : first) {
    if (tensor.shape.size() == 1) continue;
    for (const float x : tensor.values) sum += x, squares += static_cast<double>(x) * x, ++count;
  }
  ASSERT_GT(count, 1000);
  // Normal with sigma 0.02: five standard errors of the mean and of the variance.
  EXPECT_NEAR(sum / count, 0, 5 * 0.02 / std::sqrt(count));
  EXPECT_NEAR(squares / count, 0.0004, 5 * 0.0004 * std::sqrt(2 / count));
  EXPECT_EQ(first[1].values, std::vector<float>(6, 1.0f));   // a norm
  EXPECT_EQ(first[3].values, std::vector<float>(48, 0.0f));  // the biases of q, k and v
}

TEST_F(WeightLoaderTest, RanksHaveSlicesOfTheSameRandomMatrices) {
  constexpr int64_t kRows = 12, kColumns = 10;
  const auto draw = [&](Shard shard, int64_t row_begin, int64_t row_end, int64_t col_begin,
                        int64_t col_end, int64_t rows) {
    RecordingBackend backend;
    std::vector<std::byte> storage(1 << 12);
    WeightLoader loader(backend, DType::f32, shard, storage.data());
    loader.matrix({{"a.weight", {kRows, kColumns}, row_begin, row_end, col_begin, col_end}}, rows,
                  (col_end < 0 ? kColumns : col_end) - col_begin);
    loader.load_dummy(5, {});
    return backend.loaded.at(0).values;
  };
  const auto whole = draw({}, 0, -1, 0, -1, kRows);
  const auto lower = draw({1, 2}, 5, kRows, 0, -1, kRows - 5);
  EXPECT_EQ(lower, std::vector<float>(whole.begin() + 5 * kColumns, whole.end()));
  const auto right = draw({1, 2}, 0, -1, 4, kColumns, kRows);
  for (int64_t row = 0; row < kRows; ++row)
    for (int64_t c = 4; c < kColumns; ++c)
      EXPECT_EQ(right[static_cast<size_t>(row * 6 + c - 4)],
                whole[static_cast<size_t>(row * kColumns + c)]);
  const auto padded = draw({1, 2}, 8, kRows, 0, -1, 8);
  EXPECT_EQ(padded[0], whole[8 * kColumns]);
  EXPECT_EQ(padded[4 * kColumns], 0.0f);
}

}  // namespace
}  // namespace nanovllm
