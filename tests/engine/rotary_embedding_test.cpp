// RoPE tables against Hugging Face transformers: tests/data/rope, made by
// tools/make_rope_fixtures.py.
#include "layers/rotary_embedding.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "io/json.h"
#include "models/model.h"

namespace nanovllm {
namespace {

constexpr float kUlp = 1.2e-7f;  // of f32, relative

Json cases() {
  return read_json_file(std::string(NANOVLLM_SOURCE_DIR) + "/tests/data/rope/cases.json");
}

// Bit for bit but for the powers of theta: glibc rounds them correctly, and torch's vectorised pow
// is now and then off by its last bit.
TEST(RotaryEmbedding, FrequenciesAreThoseOfTransformers) {
  size_t pairs = 0, other_bits = 0;
  for (const Json& c : cases()) {
    const ModelConfig config = parse_model_config(c["config"], config_defaults);
    const auto got = inverse_frequencies(config.rope, config.head_dim);
    const auto want = c["inv_freq"].get<std::vector<float>>();
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_NEAR(got[i], want[i], kUlp * want[i]) << c["name"] << " pair " << i;
      other_bits += got[i] != want[i];
    }
    pairs += got.size();
    EXPECT_EQ(static_cast<float>(config.rope.attention_factor), c["attention_scaling"].get<float>())
        << c["name"];
  }
  EXPECT_GT(pairs, 700u);
  EXPECT_LE(other_bits, pairs / 100);
}

TEST(RotaryEmbedding, TableRowsAreThoseOfTransformers) {
  const auto ops = make_cpu_backend({.num_threads = 1});
  for (const Json& c : cases()) {
    const ModelConfig config = parse_model_config(c["config"], config_defaults);
    const RotaryEmbedding rope(*ops, config.rope, config.head_dim, config.max_position_embeddings);
    const Tensor table = rope.cos_sin();
    ASSERT_EQ(table.shape[0], config.max_position_embeddings);
    ASSERT_EQ(table.shape[1], config.head_dim);
    const auto half = static_cast<size_t>(config.head_dim / 2);
    const auto got = inverse_frequencies(config.rope, config.head_dim);
    for (size_t p = 0; p < c["positions"].size(); ++p) {
      const auto position = c["positions"][p].get<int64_t>();
      const float* row = table.ptr<float>() + position * config.head_dim;
      for (size_t i = 0; i < half; ++i) {
        const bool same = got[i] == c["inv_freq"][i].get<float>();
        const float angle = static_cast<float>(position) * got[i];
        const float tolerance = 2 * kUlp + (same ? 0 : 2 * kUlp * angle);
        EXPECT_NEAR(row[i], c["cos"][p][i].get<float>(), tolerance)
            << c["name"] << " position " << position << " pair " << i;
        EXPECT_NEAR(row[half + i], c["sin"][p][i].get<float>(), tolerance)
            << c["name"] << " position " << position << " pair " << i;
      }
    }
  }
}

TEST(RotaryEmbedding, DynamicIsRefusedBeyondTheTrainedContext) {
  const auto ops = make_cpu_backend({.num_threads = 1});
  RopeParameters rope{.type = RopeType::dynamic, .factor = 2};
  rope.original_max_position_embeddings = 100;
  EXPECT_NO_THROW(RotaryEmbedding(*ops, rope, 64, 100));
  try {
    RotaryEmbedding(*ops, rope, 64, 101);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::model);
    EXPECT_EQ(std::string(error.what()).find("config.json: rope type dynamic is exact only up to"),
              0u)
        << error.what();
  }
}

}  // namespace
}  // namespace nanovllm
