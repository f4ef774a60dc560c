// The commands around generation, and the example: tokenize, inspect, --help, --version, ten_lines.

#include <algorithm>

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
                                   {"doctor"},
                                   {"bench"},
                                   {"bench", "throughput"},
                                   {"bench", "latency"},
                                   {"bench", "prefill"},
                                   {"bench", "startup"},
                                   {"bench", "step"},
                                   {"bench", "attention"},
                                   {"bench", "gemm"}}) {
    Arguments arguments = command;
    arguments.push_back("--help");
    const auto result = nanovllm_program(arguments);
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_NE(result.output.find("Usage: nanovllm"), std::string::npos) << result.output;
    EXPECT_EQ(result.errors, "");
  }
}

// Every "--name" of a text.
std::vector<std::string> option_names(const std::string& text) {
  std::vector<std::string> names;
  for (size_t at = text.find(" --"); at != text.npos; at = text.find(" --", at + 1)) {
    const size_t end = text.find_first_not_of("abcdefghijklmnopqrstuvwxyz-", at + 1);
    names.push_back(text.substr(at + 1, end - at - 1));
  }
  return names;
}

TEST(Help, EveryOptionIsInTheDocumentation) {
  std::string docs = file_text(NANOVLLM_SOURCE_DIR "/docs/cli.md");
  std::replace(docs.begin(), docs.end(), '`', ' ');
  const std::vector<std::string> documented = option_names(docs);
  for (const Arguments& command : {Arguments{"generate", "--help"},
                                   {"chat", "--help"},
                                   {"tokenize", "--help"},
                                   {"inspect", "--help"},
                                   {"doctor", "--help"},
                                   {"bench", "throughput", "--help"},
                                   {"bench", "latency", "--help"},
                                   {"bench", "prefill", "--help"},
                                   {"bench", "startup", "--help"},
                                   {"bench", "step", "--help"},
                                   {"bench", "attention", "--help"},
                                   {"bench", "gemm", "--help"}}) {
    const auto names = option_names(nanovllm_program(command).output);
    EXPECT_GE(names.size(), 5u);
    for (const std::string& name : names)
      EXPECT_NE(std::find(documented.begin(), documented.end(), name), documented.end())
          << name << " of " << command[command.size() - 2];
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
    const auto piped =
        nanovllm_program({"tokenize", demo_model(), "--file", "/dev/stdin"}, options);
    EXPECT_EQ(piped.output, ids.output) << piped.errors;
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

TEST(Tokenize, TextMayBeginLikeAnOptionAndAMissingModelIsNamed) {
  const auto text = nanovllm_program({"tokenize", demo_model(), "--", "--hello_you=1"});
  EXPECT_EQ(text.exit_code, 0) << text.errors;
  ProcessOptions options;
  options.input = "--hello_you=1";
  EXPECT_EQ(text.output, nanovllm_program({"tokenize", demo_model()}, options).output);
  const auto nowhere = nanovllm_program({"tokenize", "/no/such/model", "x"});
  EXPECT_EQ(nowhere.exit_code, 3);
  EXPECT_NE(nowhere.errors.find("/no/such/model: no such directory"), std::string::npos)
      << nowhere.errors;
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
  // 6 layers x (key and value) x 2 heads x 64 x 2 bytes, and 4 of the token's id
  EXPECT_EQ(plan["kv_cache"]["bytes_per_token"], 3076);
  EXPECT_EQ(plan["kv_cache"]["tokens"], 6400);
  EXPECT_EQ(plan["fits"]["max_model_len"], 4);  // 94 blocks each
  EXPECT_EQ(plan["fits"]["1024"], 6);           // 64 blocks each
  EXPECT_EQ(plan["kv_cache"]["dtype"], "bf16");
  const auto fp8 = nanovllm_program({"inspect", demo_model(), "--json", "--device", "cpu",
                                     "--kv-cache-dtype", "fp8", "--cpu-kvcache-bytes", "64M"});
  ASSERT_EQ(fp8.exit_code, 0) << fp8.errors;
  EXPECT_EQ(Json::parse(fp8.output)["kv_cache"]["dtype"], "fp8_e4m3");
  // A byte for each number, and 4 for the scale of each head's row
  EXPECT_EQ(Json::parse(fp8.output)["kv_cache"]["bytes_per_token"], 6 * 2 * 2 * 68 + 4);
  const auto table = nanovllm_program({"inspect", demo_model()});
  for (const char* fragment : {"Qwen3ForCausalLM", "weights", "workspace", "KV cache", "available"})
    EXPECT_NE(table.output.find(fragment), std::string::npos) << fragment;
}

// models/demo has 3,538,944 parameters in linear layers, 12,288 rows of them, 393,216 in its tied
// head, 4,096 in norms, and a token's keys and values take 3,072 bytes.
TEST(Inspect, FormatsHaveTheirBytesAndTheirFloors) {
  const auto result = nanovllm_program({"inspect", demo_model(), "--json", "--device", "cpu"});
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const Json formats = Json::parse(result.output)["formats"];
  const int64_t numbers = 3538944, rest = 2 * (393216 + 4096);
  const std::vector<std::pair<std::string, int64_t>> expected = {
      {"bf16", 2 * numbers + rest},
      {"fp8", numbers + 4 * 12288 + rest},                // and a scale for each row
      {"int8", numbers + 4 * 12288 + rest},               // the same
      {"int4", numbers / 2 + numbers / 128 * 5 + rest}};  // for each 128 columns
  ASSERT_EQ(formats.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto& [name, bytes] = expected[i];
    EXPECT_EQ(formats[i]["name"], name);
    EXPECT_EQ(formats[i]["weights"], bytes);
    EXPECT_EQ(formats[i]["read_per_token"].get<double>(), double(bytes + 1024 * 3072));
    EXPECT_DOUBLE_EQ(formats[i]["floor_ms_on_h200"].get<double>(),
                     1e3 * double(bytes + 1024 * 3072) / 4.65e12);
    EXPECT_EQ(formats[i]["gpu_gigabytes"], 8);
    EXPECT_GT(formats[i]["kv_tokens_beside"], 100000);
  }
  const auto table =
      nanovllm_program({"inspect", NANOVLLM_SOURCE_DIR "/tests/data/goldens/quantised-fp8-blocks",
                        "--device", "cpu"});
  for (const char* fragment : {"| fp8 (fp8)", "| bf16, --dequantize", "floor on H200"})
    EXPECT_NE(table.output.find(fragment), std::string::npos) << table.output;
}

// A model for which memory is lacking may fit in another format: the table comes before the error.
TEST(Inspect, FormatsAreShownWhereMemoryIsLacking) {
  const auto result = nanovllm_program(
      {"inspect", demo_model(), "--json", "--device", "cpu", "--cpu-kvcache-bytes", "1000000G"});
  EXPECT_EQ(result.exit_code, 4);
  EXPECT_NE(result.errors.find("not enough memory"), std::string::npos) << result.errors;
  const Json formats = Json::parse(result.output)["formats"];
  ASSERT_EQ(formats.size(), 4u);
  EXPECT_EQ(formats[0]["weights"], 2 * 3538944 + 2 * (393216 + 4096));
  for (const Json& format : formats) {
    EXPECT_EQ(format["gpu_gigabytes"], 8);
    EXPECT_GT(format["kv_tokens_beside"], 1000);
  }
}

// Two bytes for each of its 8,576 embeddings, as many of the head, and 512 numbers of norms; places
// are multiples of 256 bytes.
TEST(Inspect, AQuantisedModelIsCountedAsItLiesInMemory) {
  const auto model =
      std::filesystem::path(NANOVLLM_SOURCE_DIR) / "tests/data/goldens/quantised-gptq-64-zeros";
  const auto result = nanovllm_program({"inspect", model.string(), "--json", "--device", "cpu"});
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const Json plan = Json::parse(result.output);
  EXPECT_EQ(plan["num_parameters"], 8576 + 8576 + 122880 + 512);
  // Where they stay quantised: half a byte each, and five for each group of 64.
  const bool stays =
      result.errors.find("weights of int4 (gptq) are kept as they are") != std::string::npos;
  const int64_t weights = plan["memory"]["weights"].get<int64_t>(), plain = 2 * (8576 + 8576 + 512),
                least = 122880 / 2 + 122880 / 64 * 5;
  EXPECT_GE(weights, plain + (stays ? least : 2 * 122880));
  // oneDNN pads small matrices' rows and columns: for AVX-512 with bf16 by an eighth, embeddings
  // and the head to twice their size.
  EXPECT_LT(weights, 2 * plain + 20000 + (stays ? least : 2 * 122880 * 5 / 4));
  EXPECT_TRUE(stays || result.errors.find("weights of int4 (gptq) are kept in the model's dtype "
                                          "in memory") != std::string::npos)
      << result.errors;
}

TEST(Inspect, AContextBeyondTheCpusCacheNamesTheRemedy) {
  const auto config = std::filesystem::path(NANOVLLM_SOURCE_DIR) / "bench/configs/qwen3-0.6b";
  const std::vector<std::string> arguments = {"inspect", config.string(),   "--device",
                                              "cpu",     "--max-model-len", "40960"};
  const auto refused = nanovllm_program(arguments);
  EXPECT_EQ(refused.exit_code, 2) << refused.errors;
  const std::string option = "--cpu-kvcache-bytes ";
  const size_t at = refused.errors.find(option);
  ASSERT_NE(at, std::string::npos) << refused.errors;
  auto again = arguments;
  again.insert(again.end(),
               {"--cpu-kvcache-bytes",
                std::to_string(std::stoll(refused.errors.substr(at + option.size())))});
  EXPECT_EQ(nanovllm_program(again).exit_code, 0);
}

TEST(Generate, AMemoryLimitOfTheShellIsNamed) {
  const auto program = std::filesystem::path(NANOVLLM_BINARY_DIR) / "bin" / "nanovllm";
  const auto result =
      run_process("/bin/sh", {"-c", "ulimit -v 400000; exec \"$0\" \"$@\"", program.string(),
                              "generate", demo_model(), "-p", "hi", "--device", "cpu", "-t", "1"});
  EXPECT_EQ(result.exit_code, 4) << result.errors;
  EXPECT_NE(result.errors.find("ulimit -v"), std::string::npos) << result.errors;
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
