// Options with something wrong: one clear line, and the right exit code.
#include <algorithm>
#include <cctype>
#include <fstream>
#include <sstream>

#include <gtest/gtest.h>

#include "e2e/process.h"

namespace nanovllm {
namespace {

struct Case {
  std::vector<std::string> arguments;
  std::vector<std::string> fragments;
};

TEST(BadOption, IsOneLineThatNamesItAndExitCodeTwo) {
  const std::string m = demo_model();
  const std::string blank = testing::TempDir() + "blank_keys";
  std::ofstream(blank) << " \r\n\n";
  const std::vector<Case> cases = {
      {{}, {"needs a command", "generate"}},
      {{"genrate"}, {"unknown command \"genrate\"", "did you mean generate?"}},
      {{"help", "genrate"}, {"unknown command \"genrate\"", "did you mean generate?"}},
      {{"genrate", "--help"}, {"unknown command \"genrate\"", "did you mean generate?"}},
      {{"help", "bench", "speed"}, {"unknown command \"speed\"", "nanovllm bench --help"}},
      {{"bench"}, {"throughput"}},
      {{"generate", "--prompt", "x"}, {"MODEL is missing"}},
      {{"generate", m}, {"nothing to generate from", "--prompt", "--input"}},
      {{"run", m}, {"unknown command \"run\"; it is chat here"}},
      {{"pull", "Qwen/Qwen3-0.6B"}, {"unknown command \"pull\"", "hf download"}},
      {{"list"}, {"unknown command \"list\"", "hf cache ls"}},
      {{"generate", m, "-p", "x", "-ngl", "99"}, {"unknown option \"-ngl\"", "--device"}},
      {{"serve", m, "--hf-overrides", R"({"rope_scaling": {}})"}, {"into the model's config.json"}},
      {{"serve", m, "--override-generation-config", "{}"}, {"model's generation_config.json"}},
      {{"serve", m, "--enable-lora"}, {"merged into its model"}},
      {{"generate", "-m", m, m, "-m", m, "x"}, {"MODEL is given twice"}},
      {{"generate", m, "-p", "x", "--chat-template-kwargs", R"({"a": 1})"}, {"needs --chat"}},
      {{"chat", m, "--logprobs", "3"}, {"unknown option \"--logprobs\""}},
      {{"chat", m, "--num-answers", "2"}, {"unknown option \"--num-answers\""}},
      {{"generate", m, "-p", "x", "--cpu-kvcache-bytes", "4Q"}, {"must be an integer"}},
      {{"generate", m, "-p", "x", "--cpu-kvcache-bytes", "99999999T"}, {"must be from 1 to"}},
      {{"inspect", m, "--kv-cache-dtype", "fp8_e5m2"}, {"--kv-cache-dtype", "fp8_e4m3"}},
      {{"inspect", m, "--device", "cpu", "--dtype", "f32", "--kv-cache-dtype", "bfloat16"},
       {"--kv-cache-dtype bfloat16 does not go with dtype f32"}},
      {{"generate", m, "-p", "x", "--max-model-len", "9G"}, {"must be from 1 to 2147483648"}},
      {{"quantize", m, "/no/such/out", "--quantization", "int4"},
       {"unknown option \"--quantization\"; it is --format in nanovllm quantize"}},
      {{"tokenize", m, "--ids", "1536"}, {"--ids: the vocabulary has no token 1536"}},
      {{"generate", m, "--prompt", "x", "--max-token", "5"},
       {"--max-token", "did you mean --max-tokens?"}},
      {{"generate", m, "--prompt", "x", "--frobnicate"}, {"unknown option \"--frobnicate\""}},
      {{"generate", m, "--prompt", "x", "--frobnicate=3"}, {"unknown option \"--frobnicate\""}},
      {{"bench", "latency", m, "--frob"},
       {"unknown option", "(see nanovllm bench latency --help)"}},
      {{"serve", m, "--port", "65536"}, {"--port must be an integer from 0 to 65535"}},
      {{"serve", m, "--port", "0x50"}, {"--port must be", "0x50"}},
      {{"serve", m, "--host", "203.0.113.1", "--api-key", "k"},
       {"http://203.0.113.1:8000 cannot be listened on"}},
      {{"serve", m, "--ssl-keyfile", "/dev/null"}, {"TLS needs both"}},
      {{"serve", m, "--ssl-keyfile", "/no/such"},
       {"--ssl-keyfile cannot be read: /no/such: No such file or directory"}},
      {{"serve", m, "--api-key", ""}, {"--api-key must not be empty"}},
      {{"serve", m, "--host", ""}, {"--host must not be empty"}},
      {{"serve", m, "--served-model-name="}, {"--served-model-name must not be empty"}},
      {{"serve", m, "--port=0", "--quiet", "--kv-events-config", R"({"publisher": "x"})"},
       {"--kv-events-config: publisher is x"}},
      {{"serve", m, "--api-key-file", "/dev/null"}, {"--api-key-file cannot be read", "/dev/null"}},
      {{"serve", m, "--api-key-file", blank}, {"--api-key-file", blank + " has no key in it"}},
      {{"generate", m, "--prompt", "x", "--ctx-size", "99"},
       {"\"--ctx-size\"; it is --max-model-len here"}},
      {{"generate", m, "--prompt", "x", "--repetition-penalty=0"}, {"from 0.0001 to 10000"}},
      {{"generate", m, "--prompt", "x", "--logit-bias", "15"}, {"must be a token id, + or -"}},
      {{"generate", m, "--prompt", "x", "--logit-bias", "15+101"}, {"must add from -100 to 100"}},
      {{"generate", m, "--prompt", "x", "--quiet=maybe"},
       {"--quiet must be 1 or 0, got \"maybe\""}},
      {{"generate", m, "--prompt", "x", "--json=99999999999999999999"},
       {"--json must be 1 or 0, got \"99999999999999999999\""}},
      {{"generate", m, "two", "words"}, {"unexpected argument \"words\"", "quotes"}},
      {{"tokenize", m, "two", "words"}, {"unexpected argument \"words\"", "quotes"}},
      {{"inspect", m, "more"}, {"unexpected argument \"more\" (see nanovllm inspect --help)"}},
      {{"generate", m, "--prompt"}, {"error: --prompt needs a value\n"}},
      {{"generate", m, "x", "-n"}, {"error: --max-tokens needs a value\n"}},
      {{"inspect", "-m"}, {"error: --model needs a value\n"}},
      {{"generate", m, "--prompt", "x", "--temperature", "-1"},
       {"--temperature must be", "got -1"}},
      {{"generate", m, "--prompt", "x", "--temperature", "1e300"}, {"must be from 0 to 10000"}},
      {{"generate", m, "--prompt", "x", "--temperature", "nan"}, {"--temperature must be"}},
      {{"generate", m, "--prompt", "x", "--temperature", "warm"},
       {"--temperature must be a number", "warm"}},
      {{"generate", m, "--prompt", "x", "--top-p", "0"}, {"--top-p must be in (0, 1]"}},
      {{"generate", m, "--prompt", "x", "--top-k", "-2"}, {"--top-k must be"}},
      {{"generate", m, "--prompt", "x", "--min-p", "1.5"}, {"--min-p must be in [0, 1]"}},
      {{"generate", m, "--prompt", "x", "--max-tokens", "0"},
       {"--max-tokens must be", "at least 1"}},
      {{"generate", m, "--prompt", "x", "--max-tokens", "1e9"},
       {"--max-tokens must be an integer"}},
      {{"generate", m, "--prompt", "x", "--max-tokens", "99999999999999999999"},
       {"--max-tokens must be an integer from 1 to 9223372036854775807"}},
      {{"generate", m, "--prompt", "x", "--logprobs", "21"},
       {"--logprobs must be an integer from 0 to 20"}},
      {{"generate", m, "--prompt", "x", "--stop", ""}, {"--stop must not be empty"}},
      {{"generate", m, "--prompt", "x", "--gpu-memory-utilization", "0"},
       {"--gpu-memory-utilization must be in (0, 1], got 0"}},
      {{"generate", m, "--prompt", "x", "--gpu-memory-utilization", "1.01"},
       {"must be in (0, 1], got 1.01"}},
      {{"generate", m, "--prompt", "x", "--gpu-memory-utilization", "nan"},
       {"must be in (0, 1], got nan"}},
      {{"generate", m, "--prompt", "x", "--block-size", "48"},
       {"--block-size must be a power of two from 8 to 256"}},
      {{"generate", m, "--prompt", "x", "--dtype", "fp4"},
       {"--dtype must be one of auto, bf16, f32"}},
      {{"generate", m, "--prompt", "x", "--dtype", "half"}, {"f16 checkpoints run as bf16"}},
      {{"chat", m, "--chat-template-kwargs", "[1]"},
       {"--chat-template-kwargs must be a JSON object, got \"[1]\""}},
      {{"chat", m, "--chat-template-kwargs", "{"},
       {"--chat-template-kwargs must be a JSON object, got"}},
      {{"generate", m, "--prompt", "x", "--device", "tpu"},
       {"--device must be auto, cpu, cuda or cuda:N"}},
      {{"generate", m, "--prompt", "x", "--threads", "0"}, {"--threads must be"}},
      {{"generate", m, "--prompt", "x", "--threads", "1025"}, {"--threads must be", "to 1024"}},
      {{"generate", m, "--prompt", "x", "-tp=0"}, {"--tensor-parallel-size must be", "got \"0\""}},
      {{"generate", m, "--model", m, "--prompt", "x"}, {"--model"}},
      {{"generate", m, "--prompt", "x", "--chat", "--system", "a\xff"},
       {"--system must be valid UTF-8"}},
      {{"generate", m, "--input", "/no/such/file.jsonl"},
       {"--input /no/such/file.jsonl: cannot be read: No such file"}},
      {{"generate", m, "--input", "/"}, {"--input /", "directory"}},
      {{"generate", m, "--chat", "--input", "/dev/null"}, {"--chat is for prompts", "messages"}},
      {{"tokenize", m, "--ids", "1,x"}, {"--ids must be an integer"}},
  };
  for (const Case& c : cases) {
    const auto result = nanovllm_program(c.arguments);
    std::string line = "nanovllm";
    for (const auto& a : c.arguments) line += " " + a;
    EXPECT_EQ(result.exit_code, 2) << line << "\n" << result.errors;
    EXPECT_EQ(result.output, "") << line;
    EXPECT_EQ(result.errors.find("error: "), 0u) << line << "\n" << result.errors;
    EXPECT_EQ(std::count(result.errors.begin(), result.errors.end(), '\n'), 1) << line << "\n"
                                                                               << result.errors;
    for (const auto& fragment : c.fragments)
      EXPECT_NE(result.errors.find(fragment), std::string::npos)
          << fragment << " is not in: " << result.errors;
  }
}

/// The options of a command that take a value, as its help lists them.
std::vector<std::string> options_with_values(const std::string& command) {
  std::vector<std::string> options;
  std::istringstream help(nanovllm_program({command, "--help"}).output);
  for (std::string line, names, type; std::getline(help, line);) {
    std::istringstream words(line);
    const auto is_capital = [](unsigned char letter) { return std::isupper(letter) != 0; };
    const bool has_value =
        words >> names >> type && names[0] == '-' && std::ranges::all_of(type, is_capital);
    if (has_value) options.push_back(names.substr(names.find("--")));
  }
  for (std::string& option : options) option.resize(std::min(option.find(','), option.size()));
  std::erase(options, "--output");  // takes any name of a file, and writes to it
  std::erase(options, "--json");    // a flag, whose help begins with JSON
  return options;
}

TEST(BadOption, EveryOptionTakesOrRefusesAnyValue) {
  const std::vector<std::string> values = {"",
                                           "-1",
                                           "0",
                                           "nan",
                                           "1e400",
                                           "99999999999999999999",
                                           "0x10",
                                           "1,,2",
                                           "\xff\xfe",
                                           std::string(100'000, '7'),
                                           std::string(100'000, '[')};
  for (const char* command : {"generate", "chat", "tokenize", "inspect"}) {
    const auto options = options_with_values(command);
    ASSERT_GE(options.size(), 2u) << command;
    for (const std::string& option : options)
      for (const std::string& value : values) {
        SCOPED_TRACE(std::string(command) + " " + option + "=" + value.substr(0, 30));
        std::vector<std::string> arguments = {command, "/no/such/model", option + "=" + value};
        if (arguments[0] == "generate") arguments.emplace_back("x");
        const auto result = nanovllm_program(arguments);
        EXPECT_TRUE(result.exit_code == 2 || result.exit_code == 3) << result.exit_code;
        EXPECT_EQ(result.output, "");
        // A value that is refused is refused by its name; else the model is what is wrong.
        const bool names_option = result.errors.find(option) != std::string::npos;
        EXPECT_EQ(result.exit_code, names_option ? 2 : 3) << result.errors.substr(0, 500);
        EXPECT_EQ(result.errors.find("error: "), 0u) << result.errors.substr(0, 500);
        EXPECT_EQ(std::count(result.errors.begin(), result.errors.end(), '\n'), 1);
        // A file's name is given in full.
        const bool is_file = option == "--input" || option == "--json-schema" ||
                             option == "--grammar" || option == "--chat-template";
        EXPECT_TRUE(is_file || result.errors.size() < 600) << result.errors.size();
      }
  }
}

TEST(BadOption, FromTheEnvironmentIsNamedAsSuch) {
  ProcessOptions options;
  options.environment = {{"NANOVLLM_MAX_TOKENS", "many"}};
  const auto result = nanovllm_program({"generate", demo_model(), "-q", "--prompt", "x"}, options);
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.errors,
            "error: --max-tokens (NANOVLLM_MAX_TOKENS) must be an integer of at least 1, got "
            "\"many\"\n");
  options.environment = {{"NANOVLLM_QUIET", "maybe"}};
  const auto flag = nanovllm_program({"generate", demo_model(), "--prompt", "x"}, options);
  EXPECT_EQ(flag.exit_code, 2);
  EXPECT_EQ(flag.errors, "error: --quiet (NANOVLLM_QUIET) must be 1 or 0, got \"maybe\"\n");
}

TEST(BadOption, WhatOneRunReadsAndWritesIsNotInTheEnvironment) {
  ProcessOptions options;
  options.environment = {{"NANOVLLM_JSON", "1"},
                         {"NANOVLLM_FILE", "/no/such/file"},
                         {"NANOVLLM_PROMPT", "y"},
                         {"NANOVLLM_MODEL", demo_model()}};
  const auto ids = nanovllm_program({"tokenize", demo_model(), "What"});
  const auto same = nanovllm_program({"tokenize", "What"}, options);
  EXPECT_EQ(same.exit_code, 0) << same.errors;
  EXPECT_EQ(same.output, ids.output);
}

TEST(BadOption, ValuesOfTextsMayLookLikeOptions) {
  const auto result = nanovllm_program(
      {"generate", demo_model(), "-q", "--prompt", "--x", "--stop", "-ngl", "-n", "2"});
  EXPECT_EQ(result.exit_code, 0) << result.errors;
}

TEST(BadOption, SizesMayHaveUnits) {
  const auto bytes = [](const std::string& size) {
    const auto result = nanovllm_program(
        {"inspect", demo_model(), "--json", "--cpu-kvcache-bytes", size, "--max-model-len", "2K"});
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    return Json::parse(result.output)["memory"]["kv_cache"];
  };
  EXPECT_EQ(bytes("64M"), bytes("67108864"));
  EXPECT_EQ(bytes("64MiB"), bytes("67108864"));
  EXPECT_EQ(bytes("64m"), bytes("64000000"));
}

TEST(BadOption, HelpAndVersionAreFoundByOtherNamesAndSayThatTheyCannotBeWritten) {
  const auto help = nanovllm_program({"generate", "--help"});
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_EQ(nanovllm_program({"help", "generate"}).output, help.output);
  EXPECT_EQ(nanovllm_program({"help"}).output, nanovllm_program({"--help"}).output);
  const auto version = nanovllm_program({"--version"});
  EXPECT_EQ(version.output.find("nanovllm "), 0u);
  for (const char* name : {"-V", "version"})
    EXPECT_EQ(nanovllm_program({name}).output, version.output);
  EXPECT_EQ(nanovllm_program({"chat", "--help"}).output.find("at most (16)"), std::string::npos);
  ProcessOptions full;
  full.output_file = "/dev/full";
  for (const char* option : {"--help", "--version"}) {
    const auto result = nanovllm_program({option}, full);
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_NE(result.errors.find("standard output: cannot be written"), std::string::npos);
  }
}

TEST(BadInput, TokenizeSaysThatStandardInputCannotBeRead) {
  for (const char* redirection : {"< /", "<&-"}) {
    const auto result =
        run_process("/bin/sh", {"-c", std::string(R"(exec "$0" tokenize "$1" )") + redirection,
                                NANOVLLM_BINARY_DIR "/bin/nanovllm", demo_model()});
    EXPECT_EQ(result.exit_code, 2) << redirection;
    EXPECT_NE(result.errors.find("error: standard input: cannot be read"), std::string::npos)
        << result.errors;
  }
  const auto endless = run_process("/bin/sh", {"-c", R"(exec "$0" tokenize "$1" < /dev/zero)",
                                               NANOVLLM_BINARY_DIR "/bin/nanovllm", demo_model()});
  EXPECT_EQ(endless.exit_code, 2);
  EXPECT_NE(endless.errors.find("standard input has more than 64 MiB"), std::string::npos);
}

}  // namespace
}  // namespace nanovllm
