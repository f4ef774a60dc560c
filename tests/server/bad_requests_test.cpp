// Bodies that no client should send: each costs one answer that names what is wrong, and the next
// request has its answer as before.
#include <chrono>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "server/client.h"

namespace nanovllm {
namespace {

struct Row {
  std::string body;
  int status = 400;
  std::string path = "/v1/chat/completions";
};

std::string chat_with(const std::string& member) {
  return R"({"messages":[{"role":"user","content":"x"}],"max_tokens":1,)" + member + "}";
}
std::string chat_of(const std::string& content) {
  return R"({"max_tokens":1,"messages":[{"role":"user","content":)" + content + "}]}";
}
Row completion(const std::string& prompt, const std::string& more = "") {
  return {R"({"prompt":)" + prompt + more + "}", 400, "/v1/completions"};
}

class BadRequests : public testing::Test {
 protected:
  void expect_all(const std::vector<Row>& rows) {
    const std::string golden =
        server_.post("/v1/chat/completions", chat_body()).json()["choices"].dump();
    for (const Row& row : rows) {
      const std::string shown = row.path + " " + row.body.substr(0, 300);
      const HttpAnswer answer = server_.post(row.path, row.body);
      EXPECT_EQ(answer.status, row.status) << shown << "\n" << answer.body.substr(0, 500);
      if (answer.status != 200) {
        EXPECT_LE(answer.body.size(), 2048u) << shown;
        EXPECT_FALSE(answer.json()["error"]["message"].empty()) << shown;
      }
      const HttpAnswer after = server_.post("/v1/chat/completions", chat_body());
      EXPECT_EQ(after.json()["choices"].dump(), golden) << "after " << shown;
    }
    const std::string metrics = server_.get("/metrics").body;
    EXPECT_NE(metrics.find("vllm:kv_cache_usage_perc{model_name=\"demo\",engine=\"0\"} 0\n"),
              std::string::npos);
  }
  ServerOnThread server_;
};

TEST_F(BadRequests, WhatIsNoJson) {
  std::vector<Row> rows;
  for (const char* body : {"\"x\"", "{}", "5", "{'a': 1}", "// x\n{}", "{\"model\": \"demo\"} x"})
    rows.push_back({body});
  rows.push_back({chat_with(R"("model":"demo","model":"demo")")});
  for (const char* name : {"messages", "foo", "chat_template_kwargs", "response_format", "tools"})
    rows.push_back({std::string("{\"") + name + "\":" + std::string(100000, '[')});
  rows.push_back({"{\"foo\":" + repeated("[", 1000) + repeated("]", 1000) + "}"});
  rows.push_back({chat_of("\"\\ud800\"")});
  rows.push_back({chat_of("\"\xC0\xAF\"")});
  rows.push_back({chat_of("\"\xFF\"")});
  rows.push_back({chat_of("\"a\\u0000b\""), 200});
  expect_all(rows);
}

// A template is a program: the server runs the model's.
TEST_F(BadRequests, TemplatesOfClients) {
  expect_all({{chat_with(R"("chat_template":"{{ 1 }}")")},
              {chat_with(R"("chat_template_kwargs":{"chat_template":"{{ 1 }}"})")}});
}

TEST_F(BadRequests, NumbersOutOfEveryRange) {
  std::vector<Row> rows;
  for (const char* value : {"NaN", "Infinity", "1e400", "-0.1", "2.1", "\"0.7\"", "null1"})
    rows.push_back({chat_with(std::string("\"temperature\":") + value)});
  for (const char* value :
       {"0", "-1", "2147483648", "9223372036854775808", "1e30", "\"10\"", "1.5", "true"})
    rows.push_back({R"({"messages":[{"role":"user","content":"x"}],"max_tokens":)" +
                    std::string(value) + "}"});
  for (const char* value : {"0", "-1", "129", "1000000000", "18446744073709551616", "1.5"})
    rows.push_back({chat_with(std::string("\"n\":") + value)});
  for (const char* member :
       {"\"top_p\":-1", "\"top_p\":1.01", "\"top_k\":1.5", "\"best_of\":2", "\"stream_interval\":0",
        "\"seed\":18446744073709551616", "\"presence_penalty\":1e999", "\"repetition_penalty\":-1",
        "\"min_tokens\":-1", "\"logprobs\":true,\"top_logprobs\":1000000",
        "\"logprobs\":true,\"top_logprobs\":-1", "\"stop_token_ids\":[-1]",
        "\"stop_token_ids\":[1099511627776],\"min_tokens\":1", "\"logit_bias\":{\"-1\":1}",
        "\"logit_bias\":{\"5\":1e999}", "\"stop\":5", "\"stop\":[5]", "\"priority\":1e30"})
    rows.push_back({chat_with(member)});
  rows.push_back({chat_with("\"n\":2,\"best_of\":3")});
  for (const char* member :
       {"\"n\":2,\"best_of\":2", "\"best_of\":1", "\"stream_interval\":4", "\"temperature\":-0",
        "\"temperature\":1e-12", "\"temperature\":1E-400", "\"top_k\":0", "\"top_k\":-1",
        "\"top_k\":100000", "\"seed\":-1", "\"seed\":9223372036854775807"})
    rows.push_back({chat_with(member), 200});
  expect_all(rows);
}

// A body thread reads many names in a time that grows as the body does, not as its square.
TEST_F(BadRequests, ManyNamesAreReadInTimeThatGrowsWithThem) {
  std::string names;
  for (int i = 0; i < 300000; ++i) names += fmt::format("\"{}\":1,", i);
  names.back() = '}';
  const auto begin = std::chrono::steady_clock::now();
  const std::string tool = R"("tools":[{"type":"function","name":"f","function":{"name":"f",)";
  const std::string response = R"({"input":"x","max_output_tokens":1,"tools":[)";
  expect_all(
      {{chat_with("\"logit_bias\":{" + names)},
       {chat_with("\"chat_template_kwargs\":{" + names)},
       {chat_with(tool + names + "}]"), 200},
       {response + R"({"type":"function","name":"f",)" + names + "]}", 200, "/v1/responses"}});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
}

// Each is right, and together they leave no token to choose.
TEST_F(BadRequests, RulesThatExcludeEachOther) {
  const std::string rules = R"("structured_outputs":{"choice":["a"]},"allowed_token_ids":[5])";
  expect_all({{chat_with(rules)},
              {chat_with(rules + R"(,"stream":true)")},
              {chat_with(rules + R"(,"n":2)")},
              {chat_with(R"("allowed_token_ids":[1535],"min_tokens":1)")},  // EOS
              {chat_with(R"("allowed_token_ids":[1535],"stop_token_ids":[1535],"min_tokens":1)")},
              {chat_with(R"("allowed_token_ids":[23],"bad_words":["8"])")},
              {chat_with(R"("structured_outputs":{"choice":["8"]},"bad_words":["8"])")}});
}

TEST_F(BadRequests, PromptsThatNoContextHolds) {
  std::vector<Row> rows;
  for (const char* prompt :
       {"\"\"", "[]", "[[]]", "[\"\"]", "[-1]", "[99999999]", "[1099511627776]", "[1.5]", "[true]",
        "[[5],[-1]]", "{\"a\":1}", "5", "[5,\"a\"]"})
    rows.push_back(completion(prompt));
  const std::string whole =
      "[" + repeated("5,", 2047) + "5";  // models/demo's context is 2,048 tokens
  rows.push_back(completion(whole + "]"));
  rows.push_back(completion(whole + ",5]"));
  rows.push_back(completion("[5,5,5]", ",\"max_tokens\":2046"));
  for (const char* letter : {"a", " ", "\\n", "_", "\xF0\x9F\x98\x80", "e\xCC\x81", "<|im_end|>"})
    rows.push_back({chat_of("\"" + repeated(letter, 300000) + "\"")});
  std::string many = "{\"max_tokens\":1,\"messages\":[";
  for (int i = 0; i < 4097; ++i) many += R"({"role":"user","content":"x"},)";
  many.back() = ']';
  rows.push_back({many + "}"});
  expect_all(rows);
}

TEST_F(BadRequests, WhatAnswersWouldNeedAnotherServerFor) {
  std::vector<Row> rows;
  rows.push_back({chat_of(R"([{"type":"image_url","image_url":{"url":"http://127.0.0.1:1/x"}}])")});
  rows.push_back({chat_of(R"([{"type":"input_audio","input_audio":{"data":"","format":"wav"}}])")});
  rows.push_back({chat_of(R"([{"type":"file","file":{"file_id":"x"}}])")});
  rows.push_back({chat_of("null")});
  rows.push_back({chat_with("\"echo\":true")});
  rows.push_back({chat_with("\"truncation_side\":\"right\",\"truncate_prompt_tokens\":5")});
  rows.push_back({chat_with("\"truncation_side\":\"left\",\"truncate_prompt_tokens\":5"), 200});
  rows.push_back(
      {R"({"messages":[{"role":"user","content":"x"}],"model":")" + repeated("m", 1000000) + "\"}",
       404});
  rows.push_back({R"({"prompt":"x","model":"m"})", 404, "/tokenize"});
  rows.push_back({R"({"tokens":[5],"model":"m"})", 404, "/detokenize"});
  rows.push_back({chat_with(R"("cache_salt":")" + repeated("s", 100000) + "\"")});
  rows.push_back({chat_with(R"("stop":[)" + repeated("\"x\",", 100000) + "\"x\"]")});
  rows.push_back({R"({"input":"x","previous_response_id":"r"})", 400, "/v1/responses"});
  rows.push_back({R"({"input":"x","background":true})", 400, "/v1/responses"});
  rows.push_back({R"({"input":"x","tools":[{"type":"file_search"}]})", 400, "/v1/responses"});
  rows.push_back(
      {R"({"input":"x","tools":[{"type":"mcp","server_label":"a","server_url":"http://127.0.0.1:1/"}]})",
       400, "/v1/responses"});
  rows.push_back(
      {R"({"max_tokens":1,"messages":[{"role":"user","content":[{"type":"image","source":{"type":"url","url":"http://127.0.0.1:1/"}}]}]})",
       400, "/v1/messages"});
  rows.push_back(
      {R"({"messages":[{"role":"user","content":"x"}],"max_tokens":1,"mcp_servers":[{"type":"url","url":"http://127.0.0.1:1/","name":"a"}]})",
       400, "/v1/messages"});
  expect_all(rows);
}

}  // namespace
}  // namespace nanovllm
