// Exactness over HTTP: an answer has the bytes of generate(), on every endpoint, streamed or not,
// whatever else the server does.
#include <gtest/gtest.h>

#include "server/client.h"

namespace nanovllm {
namespace {

const std::vector<std::string> kQuestions = {"What is 37 + 45?", "Tell me a story.",
                                             "Count to ten, please.", "Once upon a time"};
constexpr int kSeeds = 4, kMaxTokens = 24;

/// A request to `path` that asks questions[q] with a seed.
Json body_for(const std::string& path, size_t q, int seed, bool stream) {
  Json body = {{"temperature", 0.8}, {"seed", seed}, {"stream", stream}};
  body[path == "/v1/responses" ? "max_output_tokens" : "max_tokens"] = kMaxTokens;
  if (path == "/v1/completions")
    body["prompt"] = kQuestions[q];
  else if (path == "/v1/responses")
    body["input"] = kQuestions[q];
  else
    body["messages"] = Json::array({{{"role", "user"}, {"content", kQuestions[q]}}});
  return body;
}

std::string text_of(const Json& whole) {
  if (whole.contains("choices"))
    return whole["choices"][0].contains("text") ? whole["choices"][0]["text"]
                                                : whole["choices"][0]["message"]["content"];
  return whole.contains("output") ? whole["output"][0]["content"][0]["text"]
                                  : whole["content"][0]["text"];
}

std::string text_of_events(const std::vector<Json>& events) {
  std::string text;
  for (const Json& event : events) {
    if (event.value("type", "") == "response.output_text.delta") text += event["delta"];
    if (event.value("type", "") == "content_block_delta") text += event["delta"].value("text", "");
    if (!event.contains("choices") || event["choices"].empty()) continue;
    const Json& choice = event["choices"][0];
    text += choice.contains("text") ? choice["text"].get<std::string>()
                                    : choice["delta"].value("content", "");
  }
  return text;
}

/// The library's answer to questions[q]: as a conversation, or as the beginning of a text.
std::string generated(LLM& llm, size_t q, int seed, bool is_chat) {
  SamplingParams params = llm.default_sampling_params();
  params.temperature = 0.8;
  params.max_tokens = kMaxTokens;
  params.seed = seed;
  const Json messages = Json::array({{{"role", "user"}, {"content", kQuestions[q]}}});
  const Prompt prompt = is_chat ? llm.chat_prompt(messages.dump()) : Prompt(kQuestions[q]);
  return llm.generate({prompt}, params).front().outputs[0].text;
}

TEST(Bytes, AnswersAmong256HaveTheTextOfGenerateOnEveryEndpoint) {
  std::map<std::string, std::string> expected;
  const auto key = [](size_t q, int seed, bool is_chat) {
    return std::to_string(q) + " " + std::to_string(seed) + (is_chat ? " chat" : "");
  };
  {
    EngineConfig config;
    config.device = "cpu";
    config.num_threads = 1;
    LLM llm(std::string(NANOVLLM_SOURCE_DIR) + "/models/demo", config);
    for (size_t q = 0; q < kQuestions.size(); ++q)
      for (int seed = 0; seed < kSeeds; ++seed)
        for (const bool is_chat : {false, true})
          expected[key(q, seed, is_chat)] = generated(llm, q, seed, is_chat);
  }
  server::ServerOptions options;
  options.engine.max_num_seqs = 24;
  options.engine.block_size = 8;
  options.engine.num_gpu_blocks_override = 96;  // few: sequences are preempted
  options.engine.max_model_len = 256;
  ServerOnThread server(options);
  struct Sent {
    std::unique_ptr<Client> client;
    std::string path, key;
    bool stream;
  };
  std::vector<Sent> all;
  const std::vector<std::string> paths = {"/v1/chat/completions", "/v1/completions",
                                          "/v1/responses", "/v1/messages"};
  for (int i = 0; i < 256; ++i) {
    const auto q = static_cast<size_t>(i) % kQuestions.size();
    const int seed = i / 4 % kSeeds;
    const bool stream = i / 16 % 2 == 1;
    const std::string& path = paths[static_cast<size_t>(i / 32) % paths.size()];
    auto client = std::make_unique<Client>(server.port());
    client->send(ServerOnThread::request_text("POST", path, body_for(path, q, seed, stream).dump(),
                                              "Content-Type: application/json\r\n"));
    all.push_back({std::move(client), path, key(q, seed, path != "/v1/completions"), stream});
  }
  for (const Sent& sent : all) {
    const HttpAnswer answer = sent.client->read_answer();
    ASSERT_EQ(answer.status, 200) << answer.body;
    EXPECT_EQ(sent.stream ? text_of_events(answer.events()) : text_of(answer.json()),
              expected.at(sent.key))
        << sent.path << (sent.stream ? " streamed: " : ": ") << sent.key;
  }
}

}  // namespace
}  // namespace nanovllm
