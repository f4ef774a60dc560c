// Options and requests with something wrong: one clear line, the right exit code, and nothing lost
// for the others.
#include <algorithm>
#include <cctype>
#include <fstream>
#include <sstream>

#include <gtest/gtest.h>
#include <unistd.h>

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
      {{"bench"}, {"throughput"}},
      {{"generate", "--prompt", "x"}, {"MODEL is missing"}},
      {{"generate", m}, {"nothing to generate from", "--prompt", "--input"}},
      {{"run", m}, {"unknown command \"run\"; it is chat here"}},
      {{"pull", "Qwen/Qwen3-0.6B"}, {"unknown command \"pull\"", "hf download"}},
      {{"list"}, {"unknown command \"list\"", "hf cache ls"}},
      {{"generate", m, "-p", "x", "-ngl", "99"}, {"unknown option \"-ngl\"", "--device"}},
      {{"generate", "-m", m, m, "-m", m, "x"}, {"MODEL is given twice"}},
      {{"generate", m, "-p", "x", "--chat-template-kwargs", R"({"a": 1})"}, {"needs --chat"}},
      {{"chat", m, "--logprobs", "3"}, {"unknown option \"--logprobs\""}},
      {{"generate", m, "-p", "x", "--cpu-kvcache-bytes", "4Q"}, {"must be an integer"}},
      {{"generate", m, "-p", "x", "--cpu-kvcache-bytes", "99999999T"}, {"must be from 1 to"}},
      {{"generate", m, "-p", "x", "--max-model-len", "9G"}, {"must be from 1 to 2147483648"}},
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
      {{"serve", m, "--ssl-keyfile", "/no/such"}, {"TLS needs both"}},
      {{"serve", m, "--api-key", ""}, {"--api-key must not be empty"}},
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
      {{"inspect", m, "more"}, {"unexpected argument \"more\""}},
      {{"generate", m, "--prompt"}, {"--prompt"}},
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

struct BadLine {
  const char* line;
  const char* fragment;  // of its error
};

TEST(BadRequest, FailsAloneWithAReason) {
  const std::string long_id = R"({"prompt": "x", "id": ")" + std::string(1025, 'x') + "\"}";
  std::vector<BadLine> bad = {
      {R"({"prompt": ""})", "empty"},
      {R"({"prompt_token_ids": []})", "empty"},
      {R"({"prompt_token_ids": [1, 1536]})", "1536"},
      {R"({"prompt_token_ids": [-1]})", "prompt_token_ids"},
      {R"({"prompt_token_ids": [1099511627776]})", "got 1099511627776"},
      {R"({"prompt_token_ids": [1.5]})", "got 1.5"},
      {R"({"prompt_token_ids": [true]})", "got true"},
      {R"({"prompt_token_ids": [[]]})", "got a list of 0"},
      {R"({"prompt_token_ids": "abc"})", "prompt_token_ids must be a list of integers"},
      {R"({"prompt": 5})", "prompt must be a string"},
      {R"({"prompt": "x", "prompt_token_ids": [1]})",
       "only one of prompt, prompt_token_ids and messages"},
      {R"({"id": 1})", "needs one of prompt, prompt_token_ids and messages"},
      {R"({"prompt": "x", "temperature": 0})",
       "unknown field \"temperature\": it belongs in sampling_params"},
      {"[", "JSON over several lines"},
      {R"(  "prompt": "x",)", "JSON over several lines"},
      {"id,prompt", "not text or CSV"},
      {R"([{"prompt": "x"}])", "must be a JSON object, not a list: each line is one request"},
      {R"({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}})",
       "an OpenAI batch line"},
      {R"({"prompt": "x", "sampling_params": {"temprature": 0}})",
       "\"sampling_params.temprature\"; did you mean temperature?"},
      {R"({"prompt": "x", "sampling_params": {"temperature": -0.5}})", "temperature"},
      {R"({"prompt": "x", "sampling_params": {"temperature": 1e400}})", "line"},
      {R"({"prompt": "x", "sampling_params": {"temperature": NaN}})", "line"},
      {R"({"prompt": "x", "sampling_params": {"temperature": "0.7"}})", "got \"0.7\""},
      {R"({"prompt": "x", "sampling_params": {"seed": 1.5}})", "seed must be an integer"},
      {R"({"prompt": "x", "sampling_params": {"seed": 18446744073709551616}})", "seed"},
      {R"({"prompt": "x", "sampling_params": {"top_p": 0}})", "top_p"},
      {R"({"prompt": "x", "sampling_params": {"top_p": 1.5}})", "top_p"},
      {R"({"prompt": "x", "sampling_params": {"top_k": -7}})", "top_k"},
      {R"({"prompt": "x", "sampling_params": {"min_p": 2}})", "min_p"},
      {R"({"prompt": "x", "sampling_params": {"max_tokens": 0}})", "max_tokens"},
      {R"({"prompt": "x", "sampling_params": {"max_tokens": 1.5}})", "max_tokens"},
      {R"({"prompt": "x", "sampling_params": {"max_tokens": 99999999999999999999}})", "max_tokens"},
      {R"({"prompt": "x", "sampling_params": {"max_tokens": "10"}})", "got \"10\""},
      {R"({"prompt": "x", "sampling_params": {"max_tokens": true}})", "got true"},
      {R"({"prompt": "x", "sampling_params": {"max_tokens": 1e30}})", "max_tokens"},
      {R"({"prompt": "x", "sampling_params": {"min_tokens": -1}})", "min_tokens"},
      {R"({"prompt": "x", "sampling_params": {"min_tokens": 9, "max_tokens": 3}})", "min_tokens"},
      {R"({"prompt": "x", "sampling_params": {"logprobs": 21}})", "logprobs"},
      {R"({"prompt": "x", "sampling_params": {"stop": 3}})", "stop"},
      {R"({"prompt": "x", "sampling_params": {"stop": [""]}})", "stop"},
      {R"({"prompt": "x", "sampling_params": {"stop_token_ids": [99999]}})", "stop_token_ids"},
      {R"({"prompt": "x", "sampling_params": {"stop_token_ids": [1536], "min_tokens": 2}})",
       "1536"},
      {R"({"prompt": "x", "sampling_params": {"stop_token_ids": [-1]}})", "got -1"},
      {R"({"prompt": "x", "sampling_params": {"n": 129}})",
       "n is 129: it must be between 1 and 128"},
      {R"({"prompt": "x", "sampling_params": {"n": 0}})",
       "sampling_params.n must be an integer from 1"},
      {R"({"prompt": "x", "sampling_params": {"presence_penalty": 2.01}})",
       "presence_penalty is 2.01: it must be from -2 to 2"},
      {R"({"prompt": "x", "sampling_params": {"frequency_penalty": -2.01}})", "frequency_penalty"},
      {R"({"prompt": "x", "sampling_params": {"repetition_penalty": 0}})", "repetition_penalty"},
      {R"({"prompt": "x", "sampling_params": {"repetition_penalty": -1}})", "repetition_penalty"},
      {R"({"prompt": "x", "sampling_params": {"best_of": 2}})",
       "sampling_params.best_of must be 1"},
      {R"({"prompt": "x", "sampling_params": {"logit_bias": {"abc": 1}}})",
       "sampling_params.logit_bias must be an object whose names are token ids, got \"abc\""},
      {R"({"prompt": "x", "sampling_params": {"logit_bias": {"05": 1}}})", "logit_bias"},
      {R"({"prompt": "x", "sampling_params": {"logit_bias": {"5": null}}})",
       "sampling_params.logit_bias.5 must be a number"},
      {R"({"prompt": "x", "sampling_params": {"logit_bias": {"-1": 1}}})", "logit_bias has -1"},
      {R"({"prompt": "x", "sampling_params": {"logit_bias": {"1536": 1}}})",
       "logit_bias has 1536: ids are between 0 and 1535"},
      {R"({"prompt": "x", "sampling_params": {"logit_bias": {"5": 100.5}}})",
       "logit_bias of 5 is 100.5: it must be from -100 to 100"},
      {R"({"prompt": "x", "best_of": 1})", "unknown field \"best_of\""},
      {R"({"prompt": "x", "sampling_params": []})", "sampling_params must be an object"},
      {R"({"messages": [{"content": "x"}]})", "role"},
      {R"({"messages": {"role": "user"}})", "messages must be a list"},
      {R"({"messages": []})", "messages must be a list of at least one message, got a list of 0"},
      {R"({"messages": [{"role": "user", "content": null}]})", "chat_template"},
      {R"({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]})",
       "this engine takes text alone"},
      {R"({"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1 }}"})",
       "unknown field \"chat_template\""},
      {R"({"prompt": "x", "chat_template_kwargs": {}})", "goes with messages only"},
      {R"({"prompt": "x", "id": {}})", "id must be a string or an integer"},
      {long_id.c_str(), "id must have at most 1024 bytes"},
      {R"({"prompt": "x", "prompt": "y"})", "line"},
      {R"([1, 2])", "must be a JSON object"},
      {R"({"prompt": "x")", "line"},
      {R"({"prompt": "x",})", "line"},
      {R"({"prompt": "x"} more)", "line"},
      {R"({"prompt": "x" /* remark */})", "line"},
      {R"({"prompt": "\ud800"})", "surrogate"},
      {"{\"prompt\": \"\xff\xfe\"}", "line"},
  };
  ProcessOptions options;
  const std::string good =
      R"({"id": "good", "prompt": "What is", "sampling_params": {"temperature": 0, "max_tokens": 3}})"
      "\n";
  for (const BadLine& b : bad) options.input += good + b.line + "\n";
  const std::string deep = "{\"prompt\": \"x\", \"unknown\": " + std::string(100'000, '[');
  bad.push_back({deep.c_str(), "nested more than 64 levels"});
  options.input += good + deep + "\n";
  // Longer than the model allows, by its text.
  std::string longest(5000, ' ');
  for (size_t i = 0; i < longest.size(); i += 2) longest[i] = 'x';
  options.input += good + Json({{"prompt", longest}}).dump() + "\n";

  const auto result = nanovllm_program({"generate", demo_model(), "-q", "--input", "-"}, options);
  EXPECT_EQ(result.exit_code, 1);
  const auto lines = result.lines();
  ASSERT_EQ(lines.size(), 2 * (bad.size() + 1));
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i % 2 == 0) {
      EXPECT_EQ(lines[i]["id"], "good");
      EXPECT_EQ(lines[i]["token_ids"], lines[0]["token_ids"]);
      EXPECT_NE(lines[i]["finish_reason"], "error");
      continue;
    }
    const std::string fragment = i / 2 < bad.size() ? bad[i / 2].fragment : "max_model_len";
    EXPECT_EQ(lines[i]["finish_reason"], "error") << lines[i];
    EXPECT_NE(lines[i]["error"].get<std::string>().find(fragment), std::string::npos)
        << fragment << " is not in " << lines[i];
    EXPECT_EQ(lines[i]["error"].get<std::string>().find('\n'), std::string::npos);
  }
}

TEST(BadRequest, OnTheCommandLineIsAnErrorLine) {
  const auto result = nanovllm_program({"generate", demo_model(), "-q", "--prompt", ""});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.output, "");
  EXPECT_EQ(result.errors.find("error: "), 0u) << result.errors;
  EXPECT_NE(result.errors.find("empty"), std::string::npos) << result.errors;
  for (const char* style : {"--chat", "--json", "--quiet"}) {  // --quiet: the text alone
    const auto no_text = nanovllm_program({"generate", demo_model(), style, "--prompt", "ab\xff"});
    EXPECT_EQ(no_text.exit_code, 1) << style;
    EXPECT_NE(no_text.errors.find("error: the text is not valid UTF-8 at byte 2"),
              std::string::npos)
        << no_text.errors;
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

TEST(BadDevice, LimitsOfTheProcessAreNamed) {
  const auto under = [](const std::string& limit) {
    return run_process("/bin/bash", {"-c", limit + R"(; exec "$0" generate "$1" -q x --device cpu)",
                                     NANOVLLM_BINARY_DIR "/bin/nanovllm", demo_model()});
  };
  // Enough for oneDNN to start: it does not survive an allocation of its own that fails.
  const auto memory = under("ulimit -v 300000");
  EXPECT_EQ(memory.exit_code, 4) << memory.errors;
  EXPECT_NE(memory.errors.find("(ulimit -v)"), std::string::npos) << memory.errors;
}

/// The program with four CPU threads as a user who may have so many threads. A user of its own,
/// where this one may change: the superuser has no such limit, and anybody's other processes count.
ProcessResult with_most_threads(int most, const std::string& arguments) {
  const std::string user = ::geteuid() == 0 ? "setpriv --reuid=61234 --clear-groups " : "";
  return run_process("/bin/bash", {"-c",
                                   "exec " + user + "bash -c 'ulimit -u " + std::to_string(most) +
                                       "; exec \"$0\" " + arguments + "' \"$0\" \"$1\"",
                                   NANOVLLM_BINARY_DIR "/bin/nanovllm", demo_model()});
}

TEST(BadDevice, ThreadsThatCannotBeStartedAreOneLineWithTheRemedy) {
  if (with_most_threads(1, "--version").exit_code != 0)
    GTEST_SKIP() << "no other user may run the program";
  const auto expect_refusal = [](const ProcessResult& result) {
    EXPECT_EQ(result.exit_code, 4);
    const size_t error = result.errors.find("error: ");
    ASSERT_NE(error, std::string::npos) << result.errors;
    EXPECT_EQ(std::count(result.errors.begin() + static_cast<ptrdiff_t>(error), result.errors.end(),
                         '\n'),
              1)
        << result.errors;
    EXPECT_NE(result.errors.find("(ulimit -u)", error), std::string::npos) << result.errors;
    EXPECT_EQ(result.errors.find("libgomp"), std::string::npos) << result.errors;
  };
  for (const int most : {1, 2, 3}) {  // the threads that load, and those that compute
    SCOPED_TRACE(most);
    expect_refusal(
        with_most_threads(most, "generate \"$1\" x -q --device cpu -t 4 --max-tokens 1"));
    expect_refusal(with_most_threads(most, "serve \"$1\" -q --device cpu -t 4 --port 0"));
  }
  if (::geteuid() != 0) return;
  const ProcessResult enough =
      with_most_threads(32, "generate \"$1\" x -q --device cpu -t 4 --max-tokens 1");
  EXPECT_EQ(enough.exit_code, 0) << enough.errors;
}

TEST(BadDevice, NoGpuIsExitCodeFourAndAWayOut) {
  ProcessOptions options;
  options.environment = {{"CUDA_VISIBLE_DEVICES", ""}};
  const auto result =
      nanovllm_program({"generate", demo_model(), "--prompt", "x", "--device", "cuda"}, options);
  EXPECT_EQ(result.exit_code, 4) << result.errors;
  EXPECT_NE(result.errors.find("cpu"), std::string::npos) << result.errors;
}

TEST(BadDevice, NotEnoughMemoryIsATableWithThreeWaysOut) {
  // A KV cache of six terabytes.
  const auto result =
      nanovllm_program({"generate", demo_model(), "--prompt", "x", "--num-gpu-blocks-override",
                        "8000000", "--block-size", "256"});
  EXPECT_EQ(result.exit_code, 4) << result.errors;
  for (const char* fragment : {"error: ", "weights", "KV cache", "available"})
    EXPECT_NE(result.errors.find(fragment), std::string::npos)
        << fragment << " is not in: " << result.errors;
  EXPECT_GE(std::count(result.errors.begin(), result.errors.end(), '\n'), 6) << result.errors;
}

}  // namespace
}  // namespace nanovllm
