// Quantising plain weights: the numbers by float64 arithmetic and a search among all that there
// are, slices, and what is refused.
#include "io/quantised/quantize.h"

#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "io/quantised/quantization.h"
#include "io/quantised/quantized_weight.h"
#include "unit/io/tensor_file.h"
#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

namespace fs = std::filesystem;

const char* const kFormats[] = {"fp8", "int8", "int4"};
const std::string kModule = "model.layers.0.mlp.down_proj";

/// The nearest bf16, by its definition.
double to_bf16(double x) {
  const double step = std::ldexp(1.0, std::ilogb(x) - 7);
  return std::nearbyint(x / step) * step;
}

double e4m3(int bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const double x =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return bits & 128 ? -x : x;
}

/// The nearest of all E4M3 numbers; of two alike the even one.
int nearest_e4m3(double x) {
  int best = 0;
  for (int bits = 0; bits < 256; ++bits) {
    if ((bits & 127) == 127) continue;
    const double d = std::abs(e4m3(bits) - x), least = std::abs(e4m3(best) - x);
    if (d < least || (d == least && bits % 2 == 0 && std::signbit(e4m3(bits)) == std::signbit(x)))
      best = bits;
  }
  return best;
}

std::vector<float> random_bf16(size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 0.05f);
  std::vector<float> x(count);
  for (float& value : x) value = static_cast<float>(bf16(normal(random)));
  return x;
}

double largest(const std::vector<float>& x) {
  double most = 0;
  for (const float value : x) most = std::max(most, std::abs(double(value)));
  return most;
}

TEST(Quantise, IntegersAndE4m3AreTheNearestUnderTheLargestMagnitude) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::vector<float> x = random_bf16(64 + seed % 50, seed);
    if (seed % 3 == 0) x[seed % 50] *= 64;  // the others become small: E4M3's subnormal numbers
    std::vector<uint8_t> q(x.size());
    const double s8 = to_bf16(largest(x) / 127), s = to_bf16(largest(x) / 448);
    ASSERT_EQ(quantise(x, WeightFormat::int8, q.data()), s8) << seed;
    for (size_t i = 0; i < x.size(); ++i)
      ASSERT_EQ(static_cast<int8_t>(q[i]), std::clamp(std::nearbyint(x[i] / s8), -127.0, 127.0))
          << seed << " " << i;
    ASSERT_EQ(quantise(x, WeightFormat::e4m3, q.data()), s) << seed;
    for (size_t i = 0; i < x.size(); ++i)
      ASSERT_EQ(e4m3(q[i]), e4m3(nearest_e4m3(x[i] / s))) << seed << " " << i << ": " << x[i] / s;
  }
}

TEST(Quantise, Int4HasTheScaleOfTheLeastSquaredError) {
  std::map<double, int> chosen;
  for (unsigned seed = 0; seed < 300; ++seed) {
    const std::vector<float> x = random_bf16(seed % 2 ? 128 : 32, seed);
    std::vector<uint8_t> q(x.size());
    const double scale = quantise(x, WeightFormat::int4, q.data());
    double least = INFINITY, own = INFINITY;
    for (const double divisor : {7.0, 7.5, 8.0, 9.0, 10.0}) {
      const double s = to_bf16(largest(x) / divisor);
      double error = 0;
      for (const float value : x)
        error += std::pow(std::clamp(std::nearbyint(value / s), -8.0, 7.0) * s - value, 2);
      least = std::min(least, error);
      if (s != scale) continue;
      own = error;
      ++chosen[divisor];
    }
    ASSERT_LE(own, least * (1 + 1e-5)) << seed;  // the errors are added in f32
    for (size_t i = 0; i < x.size(); ++i)
      ASSERT_EQ(q[i] - 8, std::clamp(std::nearbyint(x[i] / scale), -8.0, 7.0)) << seed << " " << i;
  }
  EXPECT_GE(chosen.size(), 4u);
}

TEST(Quantise, RowsOfZerosAndOfTheSmallestNumbersHaveAScaleToo) {
  for (const auto to : {WeightFormat::int4, WeightFormat::int8, WeightFormat::e4m3}) {
    std::vector<uint8_t> q(32);
    EXPECT_EQ(quantise(std::vector<float>(32, 0.0f), to, q.data()), 1);
    const uint8_t zero = to == WeightFormat::int4 ? 8 : 0;
    EXPECT_EQ(q, std::vector<uint8_t>(32, zero));
    EXPECT_EQ(quantise(std::vector<float>(32, 0x1p-126f), to, q.data()), kLeastScale);
    EXPECT_EQ(q, std::vector<uint8_t>(32, zero));
  }
}

ModelConfig small_model() {
  return parse_model_config(Json{{"architectures", {"Qwen3ForCausalLM"}},
                                 {"vocab_size", 8},
                                 {"hidden_size", 64},
                                 {"intermediate_size", 384},
                                 {"num_hidden_layers", 1},
                                 {"num_attention_heads", 2},
                                 {"num_key_value_heads", 2},
                                 {"head_dim", 64}},
                            [](const std::string&) { return ConfigDefaults{}; });
}

/// A directory with one weight [n, 384] of the module, and what quantising makes of it.
class QuantisedWhileLoading : public testing::Test {
 protected:
  void write(std::vector<float> x, const std::string& dtype = "BF16") {
    StoredBytes tensor{kModule + ".weight", dtype, "", {std::ssize(x) / 384, 384}};
    for (const float value : x) {
      const bf16 half(value);
      if (dtype == "F32")
        tensor.bytes.append(reinterpret_cast<const char*>(&value), 4);
      else
        tensor.bytes.append(reinterpret_cast<const char*>(&half), 2);
    }
    write_tensors(directory_.path() / "model.safetensors", {tensor});
  }
  std::vector<std::byte> read(const std::string& format, const WeightBlock& block) {
    ModelConfig model = small_model();
    choose_quantization(model, format, false);
    const Checkpoint checkpoint(directory_.path().string());
    const auto n = checkpoint.find(kModule + ".weight")->shape[0];
    const QuantizedWeight weight(checkpoint, kModule, *model.quantization->find(kModule), n, 384);
    std::vector<std::byte> out(static_cast<size_t>(block.rows() * block.cols()) * 4);
    weight.dequantise(out.data(), DType::f32, block);
    return out;
  }
  std::string refusal(const std::string& format) {
    try {
      read(format, {0, 1, 0, 384});
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::model);
      return error.what();
    }
    return "accepted";
  }
  TempDirectory directory_;
};

// A scale is that of a row or group, whichever of its columns a rank holds.
TEST_F(QuantisedWhileLoading, ARanksPartHasTheNumbersOfTheWhole) {
  write(random_bf16(10 * 384, 1));
  std::mt19937 random(1);
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (const char* format : kFormats) {
    const auto whole = read(format, {0, 10, 0, 384});
    for (int i = 0; i < 30; ++i) {
      const int64_t row = pick(0, 9), column = i % 2 ? pick(0, 383) : 192;
      const WeightBlock block{row, pick(row + 1, 10), column, i % 2 ? pick(column + 1, 384) : 384};
      const auto part = read(format, block);
      for (int64_t r = 0; r < block.rows(); ++r)
        ASSERT_TRUE(std::equal(part.begin() + r * block.cols() * 4,
                               part.begin() + (r + 1) * block.cols() * 4,
                               whole.begin() + ((row + r) * 384 + column) * 4))
            << format << " rows " << row << " columns " << column;
    }
  }
}

TEST_F(QuantisedWhileLoading, TakesEveryDtypeThatLoads) {
  const auto x = random_bf16(2 * 384, 1);
  write(x);
  const auto expected = read("int4", {0, 2, 0, 384});
  write(x, "F32");
  EXPECT_EQ(read("int4", {0, 2, 0, 384}), expected);
}

TEST_F(QuantisedWhileLoading, RefusesNumbersThatHaveNone) {
  for (const char* format : kFormats) {
    for (const float bad : {INFINITY, -INFINITY, NAN}) {
      auto x = random_bf16(384, 1);
      x[200] = bad;
      write(x);
      EXPECT_NE(refusal(format).find("down_proj.weight has a number that is not finite"),
                std::string::npos)
          << refusal(format);
    }
    auto x = random_bf16(384, 1);
    x[200] = 1e6f;
    write(x);
    EXPECT_NE(refusal(format).find("too large to be quantised"), std::string::npos)
        << refusal(format);
  }
}

class WrittenQuantised : public testing::Test {
 protected:
  static ConfigDefaults defaults(const std::string&) { return {}; }
  std::string refusal(const std::string& from, const std::string& format = "int8") {
    try {
      write_quantised(from, out_.string(), format, defaults, {});
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  }
  /// Names in the directory that is written to.
  std::vector<std::string> names() const {
    std::vector<std::string> list;
    for (const auto& entry : fs::directory_iterator(directory_.path()))
      list.push_back(entry.path().filename().string());
    return list;
  }
  TempDirectory directory_;
  const fs::path out_ = directory_.path() / "out";
  const std::string demo_ = std::string(NANOVLLM_SOURCE_DIR) + "/models/demo";
};

TEST_F(WrittenQuantised, HasEveryFileThatTheModelNeeds) {
  ASSERT_EQ(refusal(demo_, "int4"), "accepted");
  EXPECT_EQ(names(), std::vector<std::string>{"out"});
  for (const char* same : {"tokenizer.json", "tokenizer_config.json", "generation_config.json"})
    EXPECT_EQ(read_file((out_ / same).string(), 1 << 20), read_file(demo_ + "/" + same, 1 << 20));
  Json config = read_json_file((out_ / "config.json").string());
  const Json weights = config["quantization_config"]["config_groups"]["group_0"]["weights"];
  EXPECT_EQ(weights["num_bits"], 4);
  EXPECT_EQ(weights["group_size"], 128);
  config.erase("quantization_config");
  EXPECT_EQ(config, read_json_file(demo_ + "/config.json"));
}

// The layouts as compressed-tensors describes them: int8 as it is, and so int4 beside quantised
// activations; else int4 is unsigned, the first number in the lowest bits.
TEST_F(WrittenQuantised, StoresIntegersAsCompressedTensorsDoes) {
  const std::string module = "model.layers.2.mlp.down_proj";
  const int64_t n = 256, k = 512;
  std::string plain;
  for (const StoredBytes& t : read_tensors(demo_ + "/model.safetensors"))
    if (t.name == module + ".weight") plain = t.bytes;
  for (const std::string format : {"int4", "w4a8", "int8"}) {
    SCOPED_TRACE(format);
    const bool is_int4 = format != "int8";
    const int bits = format == "int4" ? 4 : 8;  // of the file
    fs::remove_all(out_);
    ASSERT_EQ(refusal(demo_, format), "accepted");
    std::map<std::string, StoredBytes> now;
    for (StoredBytes& t : read_tensors(out_ / "model.safetensors")) now[t.name] = std::move(t);
    const int64_t group = is_int4 ? 128 : k;
    const StoredBytes &numbers = now.at(module + (bits == 4 ? ".weight_packed" : ".weight")),
                      &scales = now.at(module + ".weight_scale");
    EXPECT_EQ(numbers.dtype + scales.dtype, bits == 4 ? "I32BF16" : "I8BF16");
    EXPECT_EQ(numbers.shape, (std::vector<int64_t>{n, bits == 4 ? k / 8 : k}));
    EXPECT_EQ(scales.shape, (std::vector<int64_t>{n, k / group}));
    if (bits == 4) {
      const StoredBytes& shape = now.at(module + ".weight_shape");
      const int64_t sizes[] = {n, k};
      EXPECT_EQ(shape.dtype, "I64");
      EXPECT_EQ(shape.bytes, std::string(reinterpret_cast<const char*>(sizes), sizeof sizes));
    }
    EXPECT_EQ(now.contains(module + ".weight"), bits == 8);
    EXPECT_EQ(now.contains(module + ".weight_packed"), bits == 4);
    for (int64_t i = 0; i < n * k; ++i) {
      bf16 scale, w;
      std::memcpy(&scale, scales.bytes.data() + i / group * 2, 2);
      std::memcpy(&w, plain.data() + i * 2, 2);
      const auto byte = static_cast<uint8_t>(numbers.bytes[static_cast<size_t>(i * bits / 8)]);
      const int q = bits == 8 ? static_cast<int8_t>(byte) : (byte >> (i % 2 * 4) & 15) - 8;
      const auto s = double(static_cast<float>(scale)), x = double(static_cast<float>(w));
      const double most = is_int4 ? 7 : 127, clipped = std::clamp(x / s, -most - is_int4, most);
      ASSERT_LE(std::abs(q - clipped), 0.5) << i;
    }
  }
}

// As vLLM takes W8A8, by compressed-tensors' names.
TEST_F(WrittenQuantised, SaysThatActivationsOfEightBitsAreQuantisedByTokens) {
  for (const std::string format : {"fp8", "int8", "int4", "w4a8"}) {
    fs::remove_all(out_);
    ASSERT_EQ(refusal(demo_, format), "accepted");
    const Json config = read_json_file((out_ / "config.json").string())["quantization_config"],
               group = config["config_groups"]["group_0"], rows = group["input_activations"];
    EXPECT_EQ(config["format"], format == "fp8"    ? "float-quantized"
                                : format == "int4" ? "pack-quantized"
                                                   : "int-quantized");
    EXPECT_EQ(group["format"], config["format"]);
    EXPECT_EQ(rows.is_null(), format == "int4");
    if (rows.is_null()) continue;
    EXPECT_EQ(rows["type"], format == "fp8" ? "float" : "int");
    EXPECT_EQ(rows["type"], group["weights"]["type"]);
    EXPECT_EQ(rows["num_bits"], 8);
    EXPECT_EQ(rows["strategy"], "token");
    EXPECT_EQ(rows["dynamic"], true);
    EXPECT_EQ(rows["symmetric"], true);
  }
}

// As Hugging Face's cache has them: links.
TEST_F(WrittenQuantised, TheTemplatesOfConversationsWithToolsComeAlong) {
  const fs::path from = directory_.path() / "from", templates = from / "additional_chat_templates";
  fs::copy(demo_, from);
  fs::create_directory(templates);
  std::ofstream(directory_.path() / "blob") << "tools";
  fs::create_symlink(directory_.path() / "blob", templates / "tool_use.jinja");
  fs::create_directory(from / "onnx");
  ASSERT_EQ(refusal(from, "int8"), "accepted");
  EXPECT_EQ(read_file((out_ / "additional_chat_templates/tool_use.jinja").string(), 100), "tools");
  EXPECT_FALSE(fs::is_symlink(out_ / "additional_chat_templates/tool_use.jinja"));
  EXPECT_FALSE(fs::exists(out_ / "onnx"));
}

TEST_F(WrittenQuantised, CopiesTensorsWithoutNumbers) {
  const fs::path from = directory_.path() / "from";
  fs::copy(demo_, from);
  auto tensors = read_tensors(demo_ + "/model.safetensors");
  tensors.push_back({"no_columns.weight", "BF16", "", {4, 0}});
  tensors.push_back({"no_rows.weight", "BF16", "", {0, 64}});
  write_tensors(from / "model.safetensors", tensors);
  for (const char* format : {"int4", "int8"}) {
    fs::remove_all(out_);
    ASSERT_EQ(refusal(from, format), "accepted");
    std::map<std::string, std::vector<int64_t>> shapes;
    for (const StoredBytes& t : read_tensors(out_ / "model.safetensors")) shapes[t.name] = t.shape;
    EXPECT_EQ(shapes.at("no_columns.weight"), (std::vector<int64_t>{4, 0}));
    EXPECT_EQ(shapes.at("no_rows.weight"), (std::vector<int64_t>{0, 64}));
  }
}

TEST_F(WrittenQuantised, NothingStaysOfWhatWasStoppedOrRefused) {
  struct Stopped {};
  EXPECT_THROW(write_quantised(demo_, out_.string(), "fp8", defaults,
                               [&](int64_t done, int64_t total) {
                                 EXPECT_EQ(names().size(), 1u);
                                 EXPECT_FALSE(fs::exists(out_));
                                 if (done > total / 2) throw Stopped();
                               }),
               Stopped);
  EXPECT_EQ(names(), std::vector<std::string>{});
  EXPECT_NE(refusal(demo_, "int3").find("fp8, int8, int4 or w4a8"), std::string::npos);
  EXPECT_NE(refusal(fs::path(NANOVLLM_SOURCE_DIR) / "tests/data/goldens/quantised-packed-128")
                .find("is quantised already, int4 (compressed-tensors)"),
            std::string::npos);
  EXPECT_EQ(names(), std::vector<std::string>{});
  fs::create_directory(out_);
  EXPECT_NE(refusal(demo_).find("out exists: give the name of a directory that does not"),
            std::string::npos);
  EXPECT_TRUE(fs::is_empty(out_));
}

std::string refusal_of(ModelConfig model, const std::string& option) {
  try {
    choose_quantization(model, option, false);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
    return error.what();
  }
  return "accepted";
}

ModelConfig small_mixture(int64_t inner) {
  ModelConfig model = small_model();
  model.moe = MoeConfig{.num_experts = 4,
                        .num_experts_per_tok = 2,
                        .moe_intermediate_size = inner,
                        .mlp_only_layers = {}};
  return model;
}

TEST(ChooseQuantization, QuantisesAttentionMlpsAndExpertsAlone) {
  ModelConfig model = small_mixture(32);
  choose_quantization(model, "int4", false);
  for (const char* name : {"self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj",
                           "mlp.experts.3.gate_proj", "mlp.experts.3.down_proj"})
    EXPECT_NE(model.quantization->find(std::string("model.layers.0.") + name), nullptr) << name;
  for (const char* name : {"lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"})
    EXPECT_EQ(model.quantization->find(name), nullptr) << name;
}

TEST(ChooseQuantization, TheGroupIsTheLargestThatFillsAllRows) {
  const auto group_of = [](int64_t hidden, int64_t inner) {
    ModelConfig model = small_model();
    model.hidden_size = hidden;
    model.intermediate_size = inner;
    choose_quantization(model, "int4", false);
    return model.quantization->find(kModule)->group_size;
  };
  EXPECT_EQ(group_of(256, 384), 128);
  EXPECT_EQ(group_of(64, 384), 64);
  EXPECT_EQ(group_of(256, 96), 32);
  ModelConfig model = small_model();
  model.intermediate_size = 80;
  EXPECT_NE(refusal_of(model, "int4").find("intermediate_size 80 is no multiple"),
            std::string::npos)
      << refusal_of(model, "int4");
  EXPECT_EQ(refusal_of(model, "int8"), "accepted");

  ModelConfig mixture = small_mixture(32);  // hidden_size is 64, and no layer has a dense MLP
  mixture.intermediate_size = 80;
  choose_quantization(mixture, "int4", false);
  EXPECT_EQ(mixture.quantization->find(kModule)->group_size, 32);
  EXPECT_NE(refusal_of(small_mixture(48), "int4").find("moe_intermediate_size 48 is no multiple"),
            std::string::npos)
      << refusal_of(small_mixture(48), "int4");
}

TEST(ChooseQuantization, RefusesWhatTheCheckpointIsNot) {
  const auto gptq = fs::path(NANOVLLM_SOURCE_DIR) / "tests/data/goldens/quantised-gptq-64-zeros";
  const ModelConfig quantised =
      load_model_config(gptq.string(), [](const std::string&) { return ConfigDefaults{}; });
  for (const char* same : {"auto", "gptq", "gptq_marlin", ""})
    EXPECT_EQ(refusal_of(quantised, same), "accepted");
  for (const char* other : {"fp8", "int4", "awq"})
    EXPECT_NE(refusal_of(quantised, other).find("is quantised already, int4 (gptq)"),
              std::string::npos)
        << refusal_of(quantised, other);
  for (const char* unknown : {"gptq", "int3", "fp8,int8"})
    EXPECT_NE(refusal_of(small_model(), unknown).find("fp8, int8, int4 or w4a8"), std::string::npos)
        << refusal_of(small_model(), unknown);
}

}  // namespace
}  // namespace nanovllm
