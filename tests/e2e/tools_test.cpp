// The commands around generation, and the example: tokenize, inspect, bench, --help, --version,
// ten_lines.
#include <cmath>

#include <gtest/gtest.h>

#include "e2e/process.h"
#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

using Arguments = std::vector<std::string>;

TEST(Help, EveryCommandHasItAndSoHasTheVersion) {
  EXPECT_EQ(nanovllm_program({"--version"}).output.find("nanovllm "), 0u);
  for (const Arguments& command : {Arguments{},
                                   {"generate"},
                                   {"tokenize"},
                                   {"inspect"},
                                   {"bench"},
                                   {"bench", "throughput"},
                                   {"bench", "latency"},
                                   {"bench", "prefill"},
                                   {"bench", "startup"}}) {
    Arguments arguments = command;
    arguments.push_back("--help");
    const auto result = nanovllm_program(arguments);
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_NE(result.output.find("Usage: nanovllm"), std::string::npos) << result.output;
    EXPECT_EQ(result.errors, "");
  }
}

TEST(Help, NamesTheEnvironmentTwins) {
  EXPECT_NE(nanovllm_program({"generate", "--help"}).output.find("NANOVLLM_MAX_MODEL_LEN"),
            std::string::npos);
}

TEST(Tokenize, GivesIdsAndTakesThemBack) {
  for (const std::string text :
       {"What is 23 + 45?", "<|im_start|>user\nh\xc3\xa9llo \xf0\x9f\x98\x80<|im_end|>\n", " "}) {
    const auto ids = nanovllm_program({"tokenize", demo_model(), text});
    ASSERT_EQ(ids.exit_code, 0) << ids.errors;
    const auto back = nanovllm_program({"tokenize", demo_model(), "--ids", ids.output});
    EXPECT_EQ(back.output, text + "\n");
    ProcessOptions options;
    options.input = text;
    EXPECT_EQ(nanovllm_program({"tokenize", demo_model()}, options).output, ids.output);
  }
}

TEST(Tokenize, SpecialTokensCanStayText) {
  const auto special = nanovllm_program({"tokenize", demo_model(), "<|im_end|>", "--json"});
  ASSERT_EQ(special.exit_code, 0) << special.errors;
  EXPECT_EQ(special.lines().at(0)["ids"].size(), 1u);
  EXPECT_EQ(special.lines().at(0)["tokens"][0], "<|im_end|>");
  const auto plain =
      nanovllm_program({"tokenize", demo_model(), "<|im_end|>", "--json", "--no-parse-special"});
  EXPECT_GT(plain.lines().at(0)["ids"].size(), 1u);
  EXPECT_EQ(plain.lines().at(0)["text"], "<|im_end|>");
}

TEST(Inspect, PlanAddsUpAndFitsFollowFromIt) {
  const auto result =
      nanovllm_program({"inspect", demo_model(), "--json", "--block-size", "16", "--max-model-len",
                        "1500", "--num-gpu-blocks-override", "400"});
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const Json plan = Json::parse(result.output);
  EXPECT_EQ(plan["architecture"], "Qwen3ForCausalLM");
  EXPECT_EQ(plan["num_parameters"], 3936256);  // as transformers counts them
  const Json& memory = plan["memory"];
  EXPECT_EQ(memory["total"].get<int64_t>(), memory["weights"].get<int64_t>() +
                                                memory["workspace"].get<int64_t>() +
                                                memory["kv_cache"].get<int64_t>());
  // 6 layers x (key and value) x 2 heads x 64 x 2 bytes
  EXPECT_EQ(plan["kv_cache"]["bytes_per_token"], 3072);
  EXPECT_EQ(plan["kv_cache"]["tokens"], 6400);
  EXPECT_EQ(plan["fits"]["max_model_len"], 4);  // 94 blocks each
  EXPECT_EQ(plan["fits"]["1024"], 6);           // 64 blocks each
  const auto table = nanovllm_program({"inspect", demo_model()});
  for (const char* fragment : {"Qwen3ForCausalLM", "weights", "workspace", "KV cache", "available"})
    EXPECT_NE(table.output.find(fragment), std::string::npos) << fragment;
}

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

TEST(Bench, PrefillRunsRandomWeightsFromAConfigAlone) {
  TempDirectory directory;
  std::filesystem::copy_file(demo_model() + "/config.json", directory.path() / "config.json");
  const Json report = bench(
      {"prefill", directory.path(), "--load-format", "dummy", "--input-len", "16", "-r", "1"});
  ASSERT_EQ(report["rows"].size(), 1u);
  EXPECT_EQ(report["rows"][0]["test"], "pp16");
  expect_figures(report["rows"][0]);
}

TEST(Bench, StartupMeasuresProcessesOfItsOwn) {
  const Json report =
      bench({"startup", demo_model(), "-r", "2", "--max-model-len", "64", "--max-num-seqs", "1"});
  const Json& row = report["rows"].at(0);
  expect_figures(row);
  EXPECT_NEAR(
      row["measured"].get<double>(),
      row["program"].get<double>() + row["load"].get<double>() + row["first_token"].get<double>(),
      0.5 * row["measured"].get<double>());  // medians of each
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

TEST(Example, TenLinesAreAProgram) {
  ProcessOptions options;
  options.environment = {{"OMP_NUM_THREADS", "1"}};
  const auto result = run_process(
      std::filesystem::path(NANOVLLM_BINARY_DIR) / "bin" / "ten_lines",
      {demo_model(), "<|im_start|>user\nWhat is 23 + 45?<|im_end|>\n<|im_start|>assistant\n"},
      options);
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_NE(result.output.find("68"), std::string::npos) << result.output;
}

}  // namespace
}  // namespace nanovllm
