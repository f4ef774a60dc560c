// nanovllm bench: what its reports have in them, and what reads those.
#include <algorithm>
#include <filesystem>
#include <map>

#include <gtest/gtest.h>

#include "e2e/process.h"
#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

using Arguments = std::vector<std::string>;

// Figures are checked for being there, never for their size.
Json bench(Arguments arguments) {
  arguments.insert(arguments.begin(), "bench");
  // The rates are given: measuring them takes longer than the rest.
  arguments.insert(arguments.end(), {"--json", "-", "--bandwidth", "10", "--tflops", "0.1"});
  const auto result = nanovllm_program(arguments);
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  return result.exit_code == 0 ? Json::parse(result.output) : Json();
}

void expect_figures(const Json& row) {
  EXPECT_GT(row["measured"].get<double>(), 0);
  EXPECT_GT(row["floor"].get<double>(), 0);
  EXPECT_DOUBLE_EQ(row["share"].get<double>(),
                   row["floor"].get<double>() / row["measured"].get<double>());
}

TEST(Bench, ThroughputCountsItsTokens) {
  const Json report = bench({"throughput", demo_model(), "--num-prompts", "8", "--input-len",
                             "70-90", "--output-len", "3-9"});
  ASSERT_EQ(report["rows"].size(), 2u);
  for (const Json& row : report["rows"]) expect_figures(row);
  EXPECT_EQ(report["rows"][0]["cached_tokens"], 0);
  EXPECT_EQ(report["rows"][1]["cached_tokens"], 8 * 64);  // a block of each prompt
  EXPECT_EQ(report["rows"][0]["output_tokens"], report["rows"][1]["output_tokens"]);
}

TEST(Bench, LatencyHasARowForEachBatchAndLength) {
  const Json report = bench({"latency", demo_model(), "--batch-size", "1,3", "--input-len", "4,8",
                             "--output-len", "5", "-r", "2"});
  ASSERT_EQ(report["rows"].size(), 4u);
  for (const Json& row : report["rows"]) {
    expect_figures(row);
    EXPECT_EQ(row["test"], "tg5");
    EXPECT_GE(row["p99"].get<double>(), row["measured"].get<double>());
  }
}

TEST(Bench, AFileThatCannotBeWrittenCostsNoMeasurement) {
  const auto result =
      nanovllm_program({"bench", "latency", demo_model(), "-q", "-r", "10000", "--bandwidth", "10",
                        "--tflops", "1", "--json", "/no/such/directory/x"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.output, "");
  EXPECT_NE(result.errors.find("--json /no/such/directory/x: cannot be written"),
            std::string::npos);
}

TEST(Bench, TheFileIsWhatItIsAlsoWhereTheTableCannotBeWritten) {
  const TempDirectory directory;
  const std::string file = directory.path() / "x.json";
  const auto result = run_process(
      "/bin/sh", {"-c", "\"$0\" \"$@\" > /dev/full", NANOVLLM_BINARY_DIR "/bin/nanovllm", "bench",
                  "gemm", demo_model(), "-q", "-r", "1", "--rows", "1", "--device", "cpu",
                  "--bandwidth", "10", "--tflops", "1", "--json", file});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(Json::parse(file_text(file))["benchmark"], "gemm");
}

// oneDNN has products of bf16 from AVX-512 on: below it, this ended every benchmark.
TEST(Bench, ProcessorsWithoutBf16ProductsHaveARateToo) {
  ProcessOptions options;
  options.environment = {{"ONEDNN_MAX_CPU_ISA", "AVX2"}};
  const auto result =
      nanovllm_program({"bench", "latency", demo_model(), "--bandwidth", "10", "--input-len", "8",
                        "--output-len", "2", "-r", "1", "--json", "-"},
                       options);
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  expect_figures(Json::parse(result.output)["rows"].at(0));
}

// The first request, which does not count, must not be longer than those that do.
TEST(Bench, TheShortestRequestsAreMeasured) {
  EXPECT_EQ(
      bench({"latency", demo_model(), "--input-len", "1", "--output-len", "2"})["rows"].size(), 1u);
  EXPECT_EQ(bench({"throughput", demo_model(), "--num-prompts", "2", "--input-len", "1",
                   "--output-len", "1"})["rows"]
                .size(),
            2u);
}

TEST(Bench, PrefillRunsRandomWeightsFromAConfigAlone) {
  TempDirectory directory;
  std::filesystem::copy_file(demo_model() + "/config.json", directory.path() / "config.json");
  const Json report = bench(
      {"prefill", directory.path(), "--load-format", "dummy", "--input-len", "16", "-r", "1"});
  ASSERT_EQ(report["rows"].size(), 1u);
  EXPECT_EQ(report["rows"][0]["test"], "pp16");
  expect_figures(report["rows"][0]);
}

TEST(Bench, GemmMeasuresEveryWeightOfALayerAndTheHead) {
  for (const std::string quantization : {"auto", "int4"}) {
    const Json report = bench({"gemm", demo_model(), "--rows", "1,3", "-r", "1", "--device", "cpu",
                               "--quantization", quantization});
    const std::string f = quantization == "auto" ? "bf16" : "int4";
    std::vector<std::string> names;
    for (const Json& row : report["rows"]) {
      expect_figures(row);
      if (row["rows"] == 3)
        names.push_back(row["weight"].get<std::string>() + " " + row["format"].get<std::string>());
    }
    EXPECT_EQ(names, (std::vector<std::string>{"qkv " + f, "o " + f, "gate_up " + f, "down " + f,
                                               "lm_head bf16"}));
  }
}

// Expected values are float64 computation's of the same text: tools/make_quality.py.
TEST(Bench, QualityIsThatOfTheDefinition) {
  const Json expected = Json::parse(file_text(NANOVLLM_SOURCE_DIR "/tests/data/demo/quality.json"));
  const TempDirectory directory;
  const std::string text = directory.path() / "text";
  write_file(text, expected["text"].get<std::string>());
  const auto result = nanovllm_program(
      {"bench", "quality", demo_model(), "--text", text, "--context", expected["context"].dump(),
       "--chunks", expected["chunks"].dump(), "--dtype", "f32", "--device", "cpu", "--json", "-"});
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const Json report = Json::parse(result.output);
  EXPECT_EQ(report["tokens"], expected["tokens"]);
  ASSERT_EQ(report["rows"].size(), expected["rows"].size());
  for (size_t i = 0; i < expected["rows"].size(); ++i) {
    const Json &row = report["rows"][i], &want = expected["rows"][i];
    SCOPED_TRACE(row.dump());
    const auto near = [&](const char* key, double relative, double absolute = 0) {
      const auto value = want[key].get<double>();
      EXPECT_NEAR(row[key].get<double>(), value, relative * value + absolute) << key;
    };
    EXPECT_EQ(row["weights"], want["weights"]);
    near("perplexity", 1e-4);
    EXPECT_GT(row["weight_bytes"].get<int64_t>(), 0);
    if (i == 0) continue;
    near("kl_divergence", 1e-2, 1e-7);
    near("same_top_token", 0, 0.004);  // one of 285
    EXPECT_GE(row["kl_divergence_p99"].get<double>(), row["kl_divergence"].get<double>());
  }
}

TEST(Bench, QualityTakesFormatsAndModelsThatAreNotQuantised) {
  const TempDirectory directory;
  const std::string text = directory.path() / "text";
  write_file(text, "Once upon a time, there was a small fox named Bruno.");
  const auto run = [&](const std::string& model, const std::string& formats) {
    return nanovllm_program(
        {"bench", "quality", model, "--text", text, "--quantization", formats, "--device", "cpu"});
  };
  const auto table = run(demo_model(), "int8,fp8");
  EXPECT_EQ(table.exit_code, 0) << table.errors;
  for (const char* row : {"\n| bf16 ", "\n| int8 ", "\n| fp8 ", "same top token"})
    EXPECT_NE(table.output.find(row), std::string::npos) << row << " is not in\n" << table.output;
  EXPECT_EQ(table.output.find("int4"), std::string::npos) << table.output;
  const auto keys = nanovllm_program({"bench", "quality", demo_model(), "--text", text, "--device",
                                      "cpu", "--kv-cache-dtype", "fp8"});
  EXPECT_NE(keys.output.find("\n| bf16, keys and values fp8_e4m3 |"), std::string::npos)
      << keys.output << keys.errors;
  const auto unknown = run(demo_model(), "int8,int3");
  EXPECT_EQ(unknown.exit_code, 2);
  EXPECT_NE(unknown.errors.find("--quantization is \"int3\""), std::string::npos) << unknown.errors;
  const auto quantised =
      run(NANOVLLM_SOURCE_DIR "/tests/data/goldens/quantised-packed-128", "int8");
  EXPECT_EQ(quantised.exit_code, 2);
  EXPECT_NE(quantised.errors.find("is quantised already"), std::string::npos) << quantised.errors;
}

TEST(Bench, QualityWritesOverNothingThatItReads) {
  const TempDirectory directory;
  const std::string text = directory.path() / "text", model = directory.path() / "model";
  write_file(text, "Once upon a time");
  std::filesystem::copy(demo_model(), model);
  for (const std::string& json : {text, model + "/tokenizer.json"}) {
    const std::string before = file_text(json);
    const auto result = nanovllm_program(
        {"bench", "quality", model, "--text", text, "--json", json, "--device", "cpu"});
    EXPECT_EQ(result.exit_code, 2) << json;
    EXPECT_NE(result.errors.find("give another "), std::string::npos) << result.errors;
    EXPECT_EQ(file_text(json), before) << json;
  }
}

TEST(Bench, StartupMeasuresProcessesOfItsOwn) {
  const Json report =
      bench({"startup", demo_model(), "-r", "2", "--max-model-len", "64", "--max-num-seqs", "1"});
  const Json& row = report["rows"].at(0);
  expect_figures(row);
  EXPECT_GT(report["memory"]["peak_resident"].get<int64_t>(), 0);
}

TEST(Bench, TablesHaveTheFloorAndTheShare) {
  const auto result = nanovllm_program({"bench", "latency", demo_model(), "--output-len", "4", "-r",
                                        "1", "--bandwidth", "10", "--tflops", "0.1", "--peers"});
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  for (const char* fragment : {"| tg4 ", "floor, ms", "of the floor", "10.0 GB/s", "peers"})
    EXPECT_NE(result.output.find(fragment), std::string::npos) << fragment << " is not in\n"
                                                               << result.output;
}

TEST(Bench, StartupSaysWhatTookItsTime) {
  const Json report =
      bench({"startup", demo_model(), "-r", "1", "--max-model-len", "64", "--max-num-seqs", "1"});
  const Json& row = report["rows"].at(0);
  EXPECT_NEAR(
      row["measured"].get<double>(),
      row["program"].get<double>() + row["load"].get<double>() + row["first_token"].get<double>(),
      1e-6);
  std::map<std::string, std::pair<double, double>> phases;
  for (const Json& phase : row["phases"])
    phases[phase["phase"].get<std::string>()] = {phase["begin"].get<double>(),
                                                 phase["end"].get<double>()};
  for (const char* name :
       {"config.json", "tokenizer", "open weights", "device", "memory", "weights"}) {
    ASSERT_TRUE(phases.contains(name)) << name;
    EXPECT_LE(phases[name].first, phases[name].second) << name;
    EXPECT_LE(phases[name].second, row["load"].get<double>()) << name;
  }
  // The weights need the device; the files do not.
  EXPECT_LE(phases["device"].second, phases["memory"].first);
  EXPECT_LE(phases["memory"].second, phases["weights"].first);
}

TEST(Bench, StartupOfAModelThatCannotBeLoadedIsThatError) {
  const auto result = nanovllm_program({"bench", "startup", "/no/such/model", "-r", "2"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_EQ(
      result.errors,
      "error: /no/such/model: no such directory; give a Hugging Face model directory (nothing "
      "is downloaded)\n");
}

TEST(Bench, StepNamesEveryPartOfAStep) {
  const Json report = bench({"step", demo_model(), "--batch-size", "1,3", "--input-len", "12",
                             "--steps", "4", "-r", "2"});
  std::map<int, std::map<std::string, Json>> rows;
  for (const Json& row : report["rows"]) rows[row["batch_size"]][row["part"]] = row;
  ASSERT_EQ(rows.size(), 2u);
  for (auto& [batch, parts] : rows) {
    SCOPED_TRACE(batch);
    const std::map<std::string, int> calls = {
        {"gemm qkv", 6},     {"gemm o", 6},    {"gemm gate_up", 6}, {"gemm down", 6},
        {"gemm lm_head", 1}, {"attention", 7}, {"sampling", 1}};  // 6 layers; attention prepares
    for (const auto& [part, number] : calls) EXPECT_EQ(parts[part]["calls"], number) << part;
    for (const char* part : {"gemm qkv", "gemm lm_head", "attention", "device", "step"})
      expect_figures(parts[part]);
    // 6 layers of (4 + 2 x 2) heads of 64 by 256, in bf16 at 10 GB/s and 0.1 TFLOP/s
    const double weights = 6 * 512 * 256;
    EXPECT_NEAR(parts["gemm qkv"]["floor"].get<double>(),
                1e6 * std::max(2 * weights / 10e9, 2 * batch * weights / 0.1e12), 1e-6);
    EXPECT_NEAR(parts["step"]["of_step"].get<double>(), 100, 1e-9);
    for (const char* part :
         {"small kernels", "sum of the parts", "idle", "host work, hidden or not"})
      EXPECT_GE(parts[part]["measured"].get<double>(), 0) << part;
  }
}

TEST(Bench, StepOfPromptsNamesEveryKernel) {
  const Json report = bench(
      {"step", demo_model(), "--prefill", "--batch-size", "3", "--input-len", "12", "-r", "2"});
  std::map<std::string, Json> parts;
  for (const Json& row : report["rows"]) parts[row["part"]] = row;
  const std::map<std::string, int> calls = {
      {"gemm qkv", 6},     {"gemm o", 6},      {"gemm gate_up", 6},       {"gemm down", 6},
      {"gemm lm_head", 1}, {"attention", 7},   {"sampling", 1},           {"embedding", 1},
      {"rms_norm", 1},     {"gather_rows", 2}, {"qk_norm_rope_store", 6}, {"add_rms_norm", 12}};
  for (const auto& [part, number] : calls) EXPECT_EQ(parts[part]["calls"], number) << part;
  for (const char* part : {"gemm qkv", "gemm lm_head", "attention", "add_rms_norm", "step"})
    expect_figures(parts[part]);
  // 4 heads of 64 for a hidden size of 256; the last layer goes on with a row of each prompt.
  EXPECT_EQ(parts["gemm o"]["flops"].get<double>(), 2.0 * (5 * 36 + 3) * 256 * 256);
  // 4 FLOPs for each number of 3 prompts x 78 pairs x 4 heads x 64, in 6 layers
  EXPECT_EQ(parts["attention"]["flops"].get<double>(), 6 * 4.0 * 3 * 78 * 4 * 64);
  const auto refused =
      nanovllm_program({"bench", "step", demo_model(), "--prefill", "--batch-size", "3",
                        "--input-len", "12", "--max-num-batched-tokens", "16"});
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_NE(refused.errors.find("do not fit one step"), std::string::npos) << refused.errors;
}

// A sum behind the embedding and two in each of 6 layers, and the logits, in every step of the demo
// model.
constexpr int64_t kCollectives = 1 + 2 * 6 + 1;

TEST(Bench, StepOfRanksNamesCommunication) {
  const Json report = bench({"step", demo_model(), "-tp", "2", "--batch-size", "3", "--input-len",
                             "12", "--steps", "4", "-r", "1"});
  std::map<std::string, Json> parts;
  for (const Json& row : report["rows"]) parts[row["part"]] = row;
  EXPECT_EQ(parts["communication"]["calls"], kCollectives);
  EXPECT_EQ(parts["gemm qkv"]["calls"], 6);
  for (const char* part : {"communication", "gemm o", "device", "step"})
    EXPECT_GT(parts[part]["measured"].get<double>(), 0) << part;
}

TEST(Bench, LatencyOfRanksShowsCommunication) {
  const Json report = bench({"latency", demo_model(), "-tp", "2", "--batch-size", "1,3",
                             "--input-len", "12", "--output-len", "4", "-r", "1"});
  ASSERT_EQ(report["rows"].size(), 2u);
  for (const Json& row : report["rows"]) {
    expect_figures(row);
    EXPECT_EQ(row["collectives"], kCollectives);
    EXPECT_GT(row["communication_ms"].get<double>(), 0);
  }
}

TEST(Bench, ThroughputOfRanksShowsCommunicationOfEveryStep) {
  const Json report = bench({"throughput", demo_model(), "-tp", "2", "--num-prompts", "5",
                             "--input-len", "3-6", "--output-len", "2-6"});
  ASSERT_EQ(report["rows"].size(), 2u);
  for (const Json& row : report["rows"]) {
    expect_figures(row);
    EXPECT_GE(row["steps"].get<int64_t>(), 2);
    EXPECT_EQ(row["collectives"].get<int64_t>(), kCollectives * row["steps"].get<int64_t>());
    EXPECT_GT(row["communication"].get<double>(), 0);
  }
}

// Long prompts go through all layers but the last in halves, each with sums of its own.
TEST(Bench, PrefillOfRanksShowsCommunicationOfOneRun) {
  const Json report = bench({"prefill", demo_model(), "-tp", "2", "--batch-size", "2",
                             "--input-len", "12,100", "-r", "3"});
  ASSERT_EQ(report["rows"].size(), 2u);
  EXPECT_EQ(report["rows"][0]["collectives"], kCollectives);
  EXPECT_EQ(report["rows"][1]["collectives"], kCollectives + 2 * 5);
  for (const Json& row : report["rows"]) {
    expect_figures(row);
    EXPECT_GT(row["communication_ms"].get<double>(), 0);
  }
}

TEST(Bench, OneRankHasNoColumnOfCommunication) {
  for (const char* size : {"1", "2"}) {
    const auto result =
        nanovllm_program({"bench", "latency", demo_model(), "-tp", size, "--output-len", "4", "-r",
                          "1", "--bandwidth", "10", "--tflops", "0.1"});
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    const bool several = size == std::string("2");
    for (const char* fragment : {"communication, ms", "issued alone on all ranks"})
      EXPECT_EQ(result.output.find(fragment) != std::string::npos, several) << result.output;
  }
}

TEST(Bench, AttentionHasARowForEachShape) {
  const Json report = bench({"attention", "--device", "cpu", "-t", "1", "--batch-size", "1,2",
                             "--context", "40", "--input-len", "24", "--prompt-tokens", "48",
                             "--heads", "4x2,2x2", "--head-dim", "64", "-r", "1"});
  ASSERT_EQ(report["rows"].size(), 6u);
  for (const Json& row : report["rows"]) {
    expect_figures(row);
    EXPECT_GT(row["naive"].get<double>(), 0);
    EXPECT_DOUBLE_EQ(row["gain"].get<double>(),
                     row["naive"].get<double>() / row["measured"].get<double>());
  }
  const Json &decode = report["rows"][1], &prompt = report["rows"][2];
  EXPECT_EQ(decode["test"], "tg at 40");
  EXPECT_EQ(decode["batch_size"], 2);
  // keys and values of 2 sequences x 40 tokens x 2 heads x 64 numbers of 2 bytes, at 10 GB/s
  EXPECT_NEAR(decode["floor"].get<double>(), 2 * 2 * 40 * 2 * 64 * 2 / 10e9 * 1e6, 1e-6);
  EXPECT_EQ(prompt["test"], "pp24");
  EXPECT_EQ(prompt["batch_size"], 2);
  // 4 FLOPs for each number of 2 prompts x 300 pairs x 4 heads x 64, at 0.1 TFLOP/s
  EXPECT_NEAR(prompt["floor"].get<double>(), 4 * 2 * 300 * 4 * 64 / 0.1e12 * 1e6, 1e-6);
  const auto refused = nanovllm_program({"bench", "attention", "--heads", "3x2"});
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_NE(refused.errors.find("--heads 3 query heads are no multiple of 2 KV heads"),
            std::string::npos)
      << refused.errors;
}

TEST(Tools, TheChartHasAPointForEachRow) {
  if (!std::filesystem::exists("/usr/bin/python3")) GTEST_SKIP() << "no Python here";
  TempDirectory directory;
  const std::filesystem::path json = directory.path() / "a.json", svg = directory.path() / "a.svg";
  const auto row = [](int batch, double share) {
    return Json{{"batch_size", batch}, {"input_len", 8}, {"measured", 1.5}, {"share", share}};
  };
  write_file(json, Json{{"benchmark", "latency"},
                        {"model", "somewhere/tiny<1>"},
                        {"device", "cuda:0 A GPU"},
                        {"rows", {row(1, 0.5), row(16, 0.875)}}}
                       .dump());
  const auto result = run_process(
      "/usr/bin/python3",
      {std::string(NANOVLLM_SOURCE_DIR) + "/tools/plot_floor.py", json, "--output", svg});
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const std::string text = file_text(svg);
  for (const char* fragment : {"<svg ", "</svg>", "tiny&lt;1&gt;", ">88<", ">50<", "A GPU"})
    EXPECT_NE(text.find(fragment), std::string::npos) << fragment << " is not in\n" << text;
  size_t points = 0;
  for (size_t at = 0; (at = text.find("<circle", at)) != std::string::npos; ++at) ++points;
  EXPECT_EQ(points, 2u);
}

}  // namespace
}  // namespace nanovllm
