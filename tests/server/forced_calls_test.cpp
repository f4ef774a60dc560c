// Calls and structures that a grammar forces, whatever the model.
#include <csignal>
#include <filesystem>

#include <gtest/gtest.h>

#include "server/client.h"
#include "server/tool_bodies.h"
#include "unit/child_processes.h"

namespace nanovllm {
namespace {

// models/demo was not trained for these tools and forms: what it says here, the grammar made it
// say.
class Forced : public testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(NANOVLLM_BINARY_DIR "/bin/libnanovllm-grammar.so"))
      GTEST_SKIP() << "built without the grammar module";
    start("none");
  }
  void start(const char* reasoning_parser) {
    server_.reset();
    server::ServerOptions options;
    options.tool_call_parser = "hermes";
    options.reasoning_parser = reasoning_parser;
    server_ = std::make_unique<ServerOnThread>(options);
  }
  static Json body() {
    Json city = {{"type", "string"}, {"enum", Json::array({"Berlin", "東京"})}};
    Json body = body_with_tools();
    body["tools"][0]["function"]["parameters"] = {{"type", "object"},
                                                  {"properties", {{"city", city}}},
                                                  {"required", Json::array({"city"})},
                                                  {"additionalProperties", false}};
    body["max_tokens"] = 120;
    body["temperature"] = 1;
    body["seed"] = 7;
    return body;
  }
  /// Calls check(message) for many answers to the request, whose first tool is strict in half.
  template <class Check>
  void for_drawn_messages(Json& request, const Check& check) {
    for (const bool strict : {false, true})
      for (int seed = 0; seed < 12; ++seed) {
        request["tools"][0]["function"]["strict"] = strict;
        request["temperature"] = 2;
        request["seed"] = seed;
        const HttpAnswer answer = server_->post("/v1/chat/completions", request);
        ASSERT_EQ(answer.status, 200) << answer.body;
        check(answer.json()["choices"][0]["message"]);
      }
  }
  std::unique_ptr<ServerOnThread> server_;
};

TEST_F(Forced, ARequiredCallIsValidWhateverTheModel) {
  const Json named = {{"type", "function"}, {"function", {{"name", "get_weather"}}}};
  for (const Json& choice : {Json("required"), named}) {
    Json request = body();
    request["tool_choice"] = choice;
    request["parallel_tool_calls"] = false;
    const HttpAnswer answer = server_->post("/v1/chat/completions", request);
    ASSERT_EQ(answer.status, 200) << answer.body;
    const Json message = answer.json()["choices"][0]["message"];
    EXPECT_EQ(answer.json()["choices"][0]["finish_reason"],
              choice.is_string() ? "tool_calls" : "stop");  // as OpenAI and vLLM have it
    ASSERT_EQ(message["tool_calls"].size(), 1u) << answer.body;
    EXPECT_EQ(message["tool_calls"][0]["function"]["name"], "get_weather");
    const Json arguments =
        Json::parse(message["tool_calls"][0]["function"]["arguments"].get<std::string>());
    ASSERT_EQ(arguments.size(), 1u);
    EXPECT_TRUE(arguments["city"] == "Berlin" || arguments["city"] == "東京") << arguments;
    request["stream"] = true;
    EXPECT_EQ(accumulated(server_->post("/v1/chat/completions", request).events())["finish_reason"],
              answer.json()["choices"][0]["finish_reason"]);
  }
}

TEST_F(Forced, GrammarsThatTakeLongHoldUpNoOtherRequest) {
  const auto ask = [&](const std::string& pattern) {
    Json request = chat_body();
    request["max_tokens"] = 4;
    request["structured_outputs"] = {{"regex", pattern}};
    auto client = std::make_unique<Client>(server_->port());
    client->send(request_bytes(request));
    return client;
  };
  ASSERT_EQ(ask("a")->read_answer().status, 200);
  const auto stop_helpers = [] {
    for (const pid_t helper : child_processes()) ASSERT_EQ(::kill(helper, SIGSTOP), 0);
  };
  stop_helpers();
  // One of two finds the helper that stands still, the other starts a second one.
  const auto first = ask("b"), second = ask("c");
  ASSERT_TRUE(eventually([&] { return first->receive(0) || second->receive(0); }));
  stop_helpers();
  const auto third = ask("d");
  ASSERT_TRUE(eventually([&] { return server_->get("/load").json()["server_load"] == 2; }));
  EXPECT_EQ(server_->post("/v1/chat/completions", chat_body()).status, 200);
  EXPECT_EQ(server_->post("/tokenize", Json{{"prompt", "x"}}).status, 200);
  EXPECT_EQ(server_->get("/load").json()["server_load"], 2);  // those two still wait
  for (const pid_t helper : child_processes()) ::kill(helper, SIGCONT);
  for (const auto& client : {first.get(), second.get(), third.get()})
    EXPECT_EQ(client->read_answer().status, 200);
}

TEST_F(Forced, AStrictToolWhoseSchemaCannotBeKeptIsA400AndAFreeOneIsNot) {
  Json request = body();
  request["tools"][0]["function"]["parameters"]["properties"]["city"] = {
      {"type", "string"}, {"contentEncoding", "base64"}, {"unknownKeyword", 1}};
  request["max_tokens"] = 4;
  EXPECT_EQ(server_->post("/v1/chat/completions", request).status, 200);
  request["tools"][0]["function"]["strict"] = true;
  EXPECT_EQ(server_->post("/v1/chat/completions", request).status, 400);
}

// An MCP server's one odd schema frees its own arguments alone, and those keep their names.
TEST_F(Forced, AToolWhoseSchemaCannotBeKeptLeavesTheOthersTheirs) {
  Json request = body(), odd = request["tools"][0];
  odd["function"]["name"] = "get_weird";
  odd["function"]["parameters"]["properties"] = {
      {"path", {{"type", "string"}, {"format", "uri-reference"}}}};
  odd["function"]["parameters"]["required"] = {"path"};
  request["tools"].push_back(odd);
  request["structured_outputs"] = {{"choice", {"ЖЖ~~"}}};  // models/demo would rather call
  std::map<std::string, int> calls;
  for_drawn_messages(request, [&](const Json& message) {
    if (!message.contains("tool_calls")) return;
    const Json call = message["tool_calls"][0]["function"];
    ++calls[call["name"]];
    const Json arguments = Json::parse(call["arguments"].get<std::string>(), nullptr, false);
    if (arguments.is_discarded()) return;  // max_tokens cut it
    ASSERT_EQ(arguments.size(), 1u) << call;
    if (call["name"] == "get_weird") {
      EXPECT_TRUE(arguments.contains("path")) << call;
    } else {
      EXPECT_TRUE(arguments["city"] == "Berlin" || arguments["city"] == "東京") << call;
    }
  });
  EXPECT_GT(calls["get_weather"], 0);
  EXPECT_GT(calls["get_weird"], 0);
  request["tools"][1]["function"]["strict"] = true;
  EXPECT_EQ(server_->post("/v1/chat/completions", request).status, 400);
}

// OpenAI has this form for prompts that stay as they are, and so cached, with fewer tools to call.
TEST_F(Forced, OnlyAllowedToolsAreCalledAndThePromptNamesThemAll) {
  Json request = body(), other = request["tools"][0];
  other["function"]["name"] = "get_time";
  request["tools"].push_back(other);
  request["structured_outputs"] = {{"choice", {"ЖЖ~~"}}};  // models/demo would rather call
  const Json plain = server_->post("/v1/chat/completions/render", request).json();
  const Json names = {{{"type", "function"}, {"function", {{"name", "get_time"}}}}};
  const auto choose = [&](const char* mode, const Json& tools) {
    request["tool_choice"] = {{"type", "allowed_tools"},
                              {"allowed_tools", {{"mode", mode}, {"tools", tools}}}};
  };
  for (const char* mode : {"auto", "required"}) {
    choose(mode, names);
    EXPECT_EQ(server_->post("/v1/chat/completions/render", request).json()["token_ids"],
              plain["token_ids"]);
    int calls = 0;
    for_drawn_messages(request, [&](const Json& message) {
      for (const Json& call : message.value("tool_calls", Json::array())) {
        EXPECT_EQ(call["function"]["name"], "get_time");
        ++calls;
      }
      EXPECT_TRUE(mode == std::string("auto") || message.contains("tool_calls"));
    });
    EXPECT_GT(calls, 0) << mode;
  }
  const Json unknown = {{{"type", "function"}, {"function", {{"name", "get_rich"}}}}};
  for (const auto& [mode, tools] :
       {std::pair{"none", names}, {"auto", unknown}, {"auto", Json::array()}, {"auto", Json(1)}}) {
    choose(mode, tools);
    const HttpAnswer answer = server_->post("/v1/chat/completions", request);
    EXPECT_EQ(answer.status, 400) << request["tool_choice"];
    EXPECT_EQ(answer.json()["error"]["param"], "tool_choice") << answer.body;
  }
  Json response = Json::parse(R"({"input": "Weather?", "max_output_tokens": 120,
    "tools": [{"type": "function", "name": "a"}, {"type": "function", "name": "b"}],
    "tool_choice": {"type": "allowed_tools", "mode": "required",
                    "tools": [{"type": "function", "name": "b"}]}})");
  const HttpAnswer answer = server_->post("/v1/responses", response);
  ASSERT_EQ(answer.status, 200) << answer.body;
  EXPECT_EQ(answer.json()["output"][0]["name"], "b") << answer.body;
}

TEST_F(Forced, ABudgetBoundsTheReasoningOfAModelThatReasonsAndNoOthersAnswer) {
  start("qwen3");
  Json request = body();
  request["temperature"] = 0;
  const auto message_of = [&] {
    const HttpAnswer answer = server_->post("/v1/chat/completions", request);
    EXPECT_EQ(answer.status, 200) << answer.body;
    return answer.json()["choices"][0]["message"];
  };
  request.erase("tools");
  const Json plain = message_of();
  request["thinking_token_budget"] = 3;
  EXPECT_EQ(message_of(), plain);  // models/demo does not reason
  request["tools"] = body()["tools"];
  request["tool_choice"] = "required";
  request["parallel_tool_calls"] = false;
  Json message = message_of();
  EXPECT_TRUE(message["content"].is_null()) << message;
  EXPECT_EQ(message["tool_calls"].size(), 1u) << message;
}

// models/demo would begin with the empty line that may follow a block of reasoning.
TEST_F(Forced, AnAnswerThatDoesNotReasonIsItsStructureAlone) {
  start("qwen3");
  Json request = chat_body("What is 23 + 58?");
  request["structured_outputs"] = {{"choice", {"{\"sum\": 81}"}}};
  for (const Json& budget : {Json(), Json(-1), Json(0), Json(5)}) {  // -1: none, as in vLLM
    request["thinking_token_budget"] = budget;
    const HttpAnswer answer = server_->post("/v1/chat/completions", request);
    ASSERT_EQ(answer.status, 200) << answer.body;
    EXPECT_EQ(answer.json()["choices"][0]["message"]["content"], "{\"sum\": 81}") << budget;
  }
}

TEST_F(Forced, WhatIsWrongWithAStructureIsSaidAsOfTheClientsWhereReasoningComesFirst) {
  start("qwen3");
  Json request = body();
  request.erase("tools");
  request["structured_outputs"] = {{"json", {{"type", "object"}, {"not", Json::object()}}}};
  std::string answer = server_->post("/v1/chat/completions", request).body;
  EXPECT_NE(answer.find("\"json: #/not is not supported"), std::string::npos) << answer;
  request["structured_outputs"] = {{"regex", "a"}, {"json_object", true}};
  answer = server_->post("/v1/chat/completions", request).body;
  EXPECT_NE(answer.find("must have one of json"), std::string::npos) << answer;
}

TEST_F(Forced, AnAnswerHasTheStructureOfItsResponseFormat) {
  Json request = body();
  Json schema = request["tools"][0]["function"]["parameters"];
  request.erase("tools");
  for (const Json& format :
       {Json{{"type", "json_schema"}, {"json_schema", {{"name", "city"}, {"schema", schema}}}},
        Json{{"type", "json_object"}, {"schema", schema}}}) {
    request["response_format"] = format;
    const HttpAnswer answer = server_->post("/v1/chat/completions", request);
    ASSERT_EQ(answer.status, 200) << answer.body;
    EXPECT_EQ(answer.json()["choices"][0]["finish_reason"], "stop");
    const Json text =
        Json::parse(answer.json()["choices"][0]["message"]["content"].get<std::string>());
    EXPECT_TRUE(text["city"] == "Berlin" || text["city"] == "東京") << text;
  }
}

// As OpenAI's models and vLLM's grammar for both: a structure is that of an answer without calls.
TEST_F(Forced, AnAnswerWithToolsAndAResponseFormatIsCallsOrHasTheFormat) {
  Json request = body();
  request["response_format"] = {
      {"type", "json_schema"},
      {"json_schema", {{"name", "sum"}, {"schema", {{"enum", {"one", "two"}}}}}}};
  std::map<bool, int> answers;
  for_drawn_messages(request, [&](const Json& message) {
    const bool calls = message.contains("tool_calls");
    ++answers[calls];
    if (!calls) {
      EXPECT_TRUE(message["content"] == "\"one\"" || message["content"] == "\"two\"") << message;
    }
  });
  EXPECT_GT(answers[true], 0);
  EXPECT_GT(answers[false], 0);
  request["tool_choice"] = "required";
  const Json message =
      server_->post("/v1/chat/completions", request).json()["choices"][0]["message"];
  EXPECT_TRUE(message.contains("tool_calls")) << message;
  request["tool_choice"] = "auto";
  request["response_format"]["json_schema"]["schema"] = {{"not", Json::object()}};
  const HttpAnswer answer = server_->post("/v1/chat/completions", request);
  EXPECT_EQ(answer.status, 400);
  EXPECT_NE(answer.body.find("json: #/not is not supported"), std::string::npos) << answer.body;
  EXPECT_EQ(answer.json()["error"]["param"], "response_format");
  request["response_format"]["json_schema"]["schema"] = {{"type", "integer"}};
  request["tools"][0]["function"]["parameters"] = {{"not", Json::object()}};
  const HttpAnswer of_tools = server_->post("/v1/chat/completions", request);
  EXPECT_EQ(of_tools.status, 400);
  EXPECT_EQ(of_tools.json()["error"]["param"], "tools") << of_tools.body;
}

}  // namespace
}  // namespace nanovllm
