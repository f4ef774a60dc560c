// The benchmark's draw against Python's own, and its floors against the formulas of
// docs/benchmarks.md evaluated in Python.
#include "bench/workload.h"

#include <gtest/gtest.h>

#include "bench/roofline/roofline.h"
#include "io/quantised/quantize.h"
#include "models/model.h"

namespace nanovllm::cli {
namespace {

std::vector<int64_t> draw(uint64_t seed, int count) {
  PythonRandom random(seed);
  std::vector<int64_t> values;
  for (int i = 0; i < count; ++i) values.push_back(random.randint(0, 10000));
  return values;
}

TEST(PythonRandom, DrawsWhatPythonDraws) {
  // random.seed(s); [random.randint(0, 10000) for _ in range(6)], Python 3.11
  EXPECT_EQ(draw(1, 6), (std::vector<int64_t>{2201, 9325, 1033, 4179, 1931, 8117}));
  EXPECT_EQ(draw(12345678901234567890U, 6),
            (std::vector<int64_t>{8388, 8958, 7332, 5351, 5800, 8614}));
}

TEST(Workload, IsNanoVllmsBenchmark) {
  const Workload workload = draw_workload(0, 256, {100, 1024}, {100, 1024}, 10000);
  EXPECT_EQ(workload.prompt_tokens(), 142827);
  EXPECT_EQ(workload.output_tokens(), 133966);
  ASSERT_EQ(workload.prompts.size(), 256u);
  EXPECT_EQ(workload.prompts[0].size(), 964u);
  EXPECT_EQ(std::vector<int32_t>(workload.prompts[0].begin(), workload.prompts[0].begin() + 10),
            (std::vector<int32_t>{6311, 6890, 663, 4242, 8376, 7961, 6634, 4969, 7808, 5866}));
  EXPECT_EQ(std::vector<int32_t>(workload.prompts[255].end() - 3, workload.prompts[255].end()),
            (std::vector<int32_t>{6642, 9046, 1958}));
  EXPECT_EQ(std::vector<int64_t>(workload.max_tokens.begin(), workload.max_tokens.begin() + 5),
            (std::vector<int64_t>{845, 312, 607, 843, 500}));
  EXPECT_EQ(workload.max_tokens.back(), 312);
}

ModelConfig qwen3(int64_t layers, int64_t hidden, int64_t heads, int64_t intermediate, bool tied) {
  ModelConfig config;
  config.architecture = "Qwen3ForCausalLM";
  config.num_hidden_layers = layers;
  config.hidden_size = hidden;
  config.num_attention_heads = heads;
  config.num_key_value_heads = 8;
  config.head_dim = 128;
  config.intermediate_size = intermediate;
  config.vocab_size = 151936;
  config.tie_word_embeddings = tied;
  return config;
}

ModelConfig qwen3_30b_a3b() {
  ModelConfig config = qwen3(48, 2048, 32, 6144, false);
  config.architecture = "Qwen3MoeForCausalLM";
  config.num_key_value_heads = 4;
  MoeConfig& moe = config.moe.emplace();
  moe.num_experts = 128;
  moe.num_experts_per_tok = 8;
  moe.moe_intermediate_size = 768;
  return config;
}

struct Expected {
  ModelConfig config;
  int64_t parameters;
  double decode_1, decode_256, prefill, offline;  // seconds at 4.65 TB/s and 790 TFLOP/s
};

TEST(Roofline, FloorsAreThoseOfTheReference) {
  const Expected cases[] = {
      {qwen3(28, 1024, 16, 3072, true), 596049920, 0.0002816215810752688, 0.006851842873667075,
       0.17365399020038483 + 0.0035226974141935484, 3.4469694252471936},
      {qwen3(36, 4096, 32, 12288, false), 8190735360, 0.0032877002047311827, 0.013217933115144468,
       2.5487510203923445 + 0.004529182389677419, 10.072332666607902},
      {qwen3_30b_a3b(), 30532122624, 0.0013299782468817205, 0.01860798583316916,
       1.0365687947834328 + 0.003019454926451613, 16.200664447549887},
  };
  const Workload workload = draw_workload(0, 256, {100, 1024}, {100, 1024}, 10000);
  std::vector<int64_t> prompt_lens;
  for (const auto& ids : workload.prompts) prompt_lens.push_back(static_cast<int64_t>(ids.size()));
  for (const Expected& e : cases) {
    const WeightReads reads = count_reads(e.config, DType::bf16);
    EXPECT_EQ(reads.layers.parameters + reads.experts.parameters + reads.head.parameters +
                  reads.embeddings,
              e.parameters);
    const Roofline roofline(e.config, reads, DType::bf16, {4.65e12, 790e12});
    EXPECT_NEAR(roofline.decode_step(1, 1024) / e.decode_1, 1, 1e-12);
    EXPECT_NEAR(roofline.decode_step(256, 256 * 1024) / e.decode_256, 1, 1e-12);
    EXPECT_NEAR(roofline.prefill(prompt_lens) / e.prefill, 1, 1e-12);
    EXPECT_NEAR(roofline.offline(prompt_lens, workload.max_tokens) / e.offline, 1, 1e-9);
  }
}

/// A configuration of bench/configs, its plain weights quantised as --quantization says.
ModelConfig shape(const std::string& name, const std::string& quantization = "auto") {
  ModelConfig config =
      load_model_config(NANOVLLM_SOURCE_DIR "/bench/configs/" + name, config_defaults);
  choose_quantization(config, quantization, false);
  return config;
}

// Of one layer of Qwen3-8B: qkv [6144, 4096], o [4096, 4096], gate_up [24576, 4096], down [4096,
// 12288], two norms of 4096 and two of 128, which with the last norm are bf16.
constexpr int64_t kLinear = 36 * int64_t{192937984};
constexpr double kNorms = 2 * (36 * (2 * 4096 + 2 * 128) + 4096), kHead = 151936 * 4096;

TEST(Roofline, QuantisedWeightsHaveTheBytesOfTheirFormat) {
  struct Case {
    std::string config, quantization;
    double linear;  // bytes of the linear layers
    int64_t quantising_rows;
  };
  const Case cases[] = {
      {"qwen3-8b", "auto", 2.0 * kLinear, 0},
      // A byte, and 4 for each of 38,912 rows of a layer.
      {"qwen3-8b", "fp8", kLinear + 36 * 38912 * 4.0, kLinear},
      {"qwen3-8b", "int8", kLinear + 36 * 38912 * 4.0, kLinear},
      // Half a byte, and for each 128 numbers 5: a scale and a zero point.
      {"qwen3-8b", "int4", kLinear * (0.5 + 5.0 / 128), 0},
      {"qwen3-8b-awq", "auto", kLinear * (0.5 + 5.0 / 128), 0},
      // A byte, and 4 for each block of 128 x 128.
      {"qwen3-8b-fp8", "auto", kLinear * (1 + 4.0 / 16384), kLinear},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.config + " " + c.quantization);
    const WeightReads reads = count_reads(shape(c.config, c.quantization), DType::bf16);
    EXPECT_DOUBLE_EQ(reads.layers.bytes, c.linear + kNorms);
    EXPECT_EQ(reads.layers.quantising_rows, c.quantising_rows);
    EXPECT_DOUBLE_EQ(reads.head.bytes, 2 * kHead);
    EXPECT_EQ(reads.head.quantising_rows, 0);
    EXPECT_EQ(reads.embeddings, int64_t{151936} * 4096);
  }
  // In f32 nothing stays quantised.
  EXPECT_DOUBLE_EQ(count_reads(shape("qwen3-8b", "int4"), DType::f32).layers.bytes,
                   4.0 * kLinear + 2 * kNorms);
}

TEST(Roofline, FloorsCountQuantisedWeightsAndActivations) {
  const Rates rates{4.65e12, 790e12, 1580e12};
  const ModelConfig config = shape("qwen3-8b-fp8");
  const Roofline fp8(config, count_reads(config, DType::bf16), DType::bf16, rates);
  const double layers = kLinear * (1 + 4.0 / 16384) + kNorms, kv = 36 * 2 * 8 * 128 * 2;
  EXPECT_DOUBLE_EQ(fp8.decode_bytes(1, 1024), layers + 2 * kHead + 1024 * kv);
  EXPECT_DOUBLE_EQ(fp8.decode_step(1, 1024), (layers + 2 * kHead + 1024 * kv) / 4.65e12);
  // 16 prompts of 1,024: products of 8 bits at twice the rate of the norms, head and attention.
  const double attention = 4.0 * 36 * 4096 * 16 * 1024 * 1025 / 2;
  const double expected = 2.0 * 16384 * kLinear / 1580e12 +
                          (16384 * kNorms + 2 * 16 * kHead + attention) / 790e12 +
                          16384 * kv / 4.65e12;
  EXPECT_NEAR(fp8.prefill(std::vector<int64_t>(16, 1024)) / expected, 1, 1e-12);
  // Weights alone: products at the rate of bf16.
  const ModelConfig packed = shape("qwen3-8b-awq");
  const Roofline int4(packed, count_reads(packed, DType::bf16), DType::bf16, rates);
  EXPECT_NEAR(int4.prefill(std::vector<int64_t>(16, 1024)) / expected,
              1 + 2.0 * 16384 * kLinear / 1580e12 / expected, 1e-12);
  EXPECT_DOUBLE_EQ(int4.decode_step(1, 0),
                   (kLinear * (0.5 + 5.0 / 128) + kNorms + 2 * kHead) / 4.65e12);
}

}  // namespace
}  // namespace nanovllm::cli
