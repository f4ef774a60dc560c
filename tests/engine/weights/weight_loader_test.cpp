#include "weights/weight_loader.h"

#include <algorithm>
#include <fstream>

#include <gtest/gtest.h>

#include "engine/weights/weight_loader_rig.h"
#include "io/quantised/quantization.h"
#include "layers/embed_head.h"
#include "layers/linear.h"

namespace nanovllm {
namespace {

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
  EXPECT_EQ(message(1).find("transformers"), std::string::npos) << message(1);
  tensors.push_back({"model.layers.1.mlp.experts.gate_up_proj", "F32", std::string(8, ' '), {2}});
  write(tensors);
  EXPECT_NE(message(1).find("transformers"), std::string::npos) << message(1);
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

/// It keeps all quantised weights as they are.
struct KeepingBackend : NullBackend {
  bool keeps(WeightFormat, int64_t, int64_t, bool) const override { return true; }
};

// docs/contract.md: large models alone, and nothing where two ranks would add a bias in between, or
// whose rows of activations are quantised with one scale.
TEST_F(WeightLoaderTest, OneRankHasWideRowParallelWeightsInHalves) {
  NullBackend backend;
  KeepingBackend keeping;
  for (const bool has_blocks : {false, true}) {
    Json json = Json::parse(R"({"quantization_config": {"quant_method": "fp8",
        "modules_to_not_convert": ["plain.o_proj"]}})");
    if (has_blocks) json["quantization_config"]["weight_block_size"] = {128, 128};
    std::vector<std::string> warnings;
    const QuantizationConfig fp8(
        *JsonObject(json, "config.json", ErrorKind::model).optional_object("quantization_config"),
        warnings);
    for (const bool keeps : {false, true})
      for (const bool is_plain : {false, true}) {
        WeightLoader load(keeps ? keeping : backend, DType::bf16, {}, nullptr, &fp8);
        const Weight weight =
            load.row_parallel(is_plain ? "plain.o_proj" : "o_proj", 4096, 12288, true);
        EXPECT_EQ(weight.format.quantises_rows(), keeps && !is_plain);
        EXPECT_EQ(weight.format.in_halves, has_blocks || !keeps || is_plain);
      }
  }
  const auto in_halves = [&](int world, int64_t n, int64_t k, bool may_halve) {
    WeightLoader load(backend, DType::bf16, {world - 1, world});
    const Weight weight = load.row_parallel("o_proj", n, k, may_halve);
    EXPECT_EQ(weight.k(), k / world);
    return weight.format.in_halves;
  };
  EXPECT_TRUE(in_halves(1, 4096, 12288, true));
  EXPECT_TRUE(in_halves(1, 1024, 3072, true));
  EXPECT_FALSE(in_halves(2, 4096, 12288, true));
  EXPECT_FALSE(in_halves(1, 4096, 12288, false));
  EXPECT_FALSE(in_halves(1, 1016, 3072, true));
  EXPECT_TRUE(in_halves(1, 2560, 9728, true));
  EXPECT_TRUE(in_halves(1, 1536, 8960, true));
  EXPECT_FALSE(in_halves(1, 1536, 8832, true));
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
  auto tensors = weights_.tensors;
  std::erase_if(tensors, [](const StoredBytes& t) { return t.name == "lm_head.weight"; });
  write(tensors);
  const auto without = load_shard(tied, checkpoint(), {});
  tensors.push_back(*std::ranges::find(tensors, "model.embed_tokens.weight", &StoredBytes::name));
  tensors.back().name = "lm_head.weight";
  write(tensors);
  EXPECT_EQ(load_shard(tied, checkpoint(), {}), without);
  // A head that was trained apart: transformers 5 does not tie it, whatever config.json says.
  tensors.back().bytes.back() ^= 1;
  write(tensors);
  const Checkpoint apart = checkpoint();
  try {
    load_shard(tied, apart, {});
    ADD_FAILURE() << "a head of its own was passed over";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::model);
    EXPECT_NE(std::string(error.what()).find("tie_word_embeddings"), std::string::npos);
  }
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
      {[&](auto& t) {
         std::erase_if(t, [&](const StoredBytes& x) { return x.name == "lm_head.weight"; });
       },
       {"lacks tensor lm_head.weight", "set tie_word_embeddings to true"}},
      {[&](auto& t) { at(t).dtype = "I32"; }, {name, "I32", "BF16"}},
      // Packed numbers of MLX and bitsandbytes: not only another shape.
      {[&](auto& t) { at(t).dtype = "I32", at(t).shape = {48}; }, {name, "I32", "BF16"}},
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
  find_architecture(config_.architecture).make(config_, {loader, {}});
  int64_t last = 0, end = 0;
  loader.load(checkpoint(), [&](int64_t done, int64_t total) {
    EXPECT_GT(done, last);
    last = done;
    end = total;
  });
  EXPECT_EQ(last, end);
}

TEST_F(WeightLoaderTest, AFileThatChangesWhileItIsLoadedIsAnError) {
  write(weights_.tensors);
  RecordingBackend backend;
  std::vector<std::byte> storage(1 << 20);
  WeightLoader loader(backend, DType::f32, {}, storage.data());
  find_architecture(config_.architecture).make(config_, {loader, {}});
  const Checkpoint opened = checkpoint();
  const auto grow = [&](int64_t, int64_t) {
    std::ofstream(opened.file_of(weights_.tensors.front().name), std::ios::app) << "x";
  };
  try {
    loader.load(opened, grow);
    ADD_FAILURE() << "nothing was noticed";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::model) << error.what();
  }
}

}  // namespace
}  // namespace nanovllm
