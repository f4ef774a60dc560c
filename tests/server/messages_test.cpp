// /v1/messages and /v1/responses: the same answers as a chat's, in the words of other APIs. The
// order of events and the names of fields are those of the APIs' documentation; that their SDKs
// read them is tests/sdk's.
#include <gtest/gtest.h>

#include "server/client.h"

namespace nanovllm {
namespace {

struct Event {
  std::string name;
  Json data;
};

std::vector<Event> named_events(const HttpAnswer& answer) {
  std::vector<Event> list;
  for (size_t at = 0; (at = answer.body.find("event: ", at)) != std::string::npos;) {
    const size_t line = answer.body.find('\n', at), end = answer.body.find("\n\n", at);
    list.push_back({answer.body.substr(at + 7, line - at - 7),
                    Json::parse(answer.body.substr(line + 7, end - line - 7))});
    at = end;
  }
  return list;
}

std::vector<std::string> names(const std::vector<Event>& events) {
  std::vector<std::string> list;
  for (const Event& event : events)
    if (list.empty() || list.back() != event.name) list.push_back(event.name);
  return list;
}

class OtherApis : public testing::Test {
 protected:
  static Json message_body() {
    Json body = chat_body();
    body["max_tokens"] = 100;
    return body;
  }
  std::string chat_text(const Json& body) {
    const HttpAnswer answer = server_.post("/v1/chat/completions", body);
    EXPECT_EQ(answer.status, 200) << answer.body;
    return answer.json()["choices"][0]["message"]["content"];
  }
  size_t prompt_length(const Json& chat) { return server_.post("/tokenize", chat).json()["count"]; }

  ServerOnThread server_;
};

TEST_F(OtherApis, AMessageHasTheTextOfTheChat) {
  const Json body = message_body();
  const HttpAnswer answer = server_.post("/v1/messages", body.dump(),
                                         "anthropic-version: 2023-06-01\r\nanthropic-beta: x\r\n");
  ASSERT_EQ(answer.status, 200) << answer.body;
  const Json message = answer.json();
  EXPECT_EQ(message["type"], "message");
  EXPECT_EQ(message["role"], "assistant");
  ASSERT_EQ(message["content"].size(), 1u);
  EXPECT_EQ(message["content"][0]["type"], "text");
  EXPECT_EQ(message["content"][0]["text"], chat_text(body));
  EXPECT_EQ(message["stop_reason"], "end_turn");
  EXPECT_TRUE(message["stop_sequence"].is_null());
  EXPECT_EQ(message["usage"]["input_tokens"], prompt_length(body));
}

TEST_F(OtherApis, AMessagesEventsAddUpToTheWholeOne) {
  Json body = message_body();
  const Json whole = server_.post("/v1/messages", body).json();
  body["stream"] = true;
  const auto events = named_events(server_.post("/v1/messages", body));
  EXPECT_EQ(names(events), (std::vector<std::string>{"message_start", "ping", "content_block_start",
                                                     "content_block_delta", "content_block_stop",
                                                     "message_delta", "message_stop"}));
  std::string text;
  for (const Event& event : events) {
    EXPECT_EQ(event.data["type"], event.name);
    if (event.name == "content_block_delta") {
      EXPECT_EQ(event.data["delta"]["type"], "text_delta");
      text += event.data["delta"]["text"].get<std::string>();
    }
  }
  EXPECT_EQ(whole["content"][0]["text"], text);
  EXPECT_EQ(events[0].data["message"]["usage"]["input_tokens"], whole["usage"]["input_tokens"]);
  const Json& last = events[events.size() - 2].data;
  EXPECT_EQ(last["delta"]["stop_reason"], whole["stop_reason"]);
  EXPECT_EQ(last["usage"], whole["usage"]);
}

TEST_F(OtherApis, AMessageSaysWhyItEnded) {
  Json body = message_body();
  body["max_tokens"] = 2;
  EXPECT_EQ(server_.post("/v1/messages", body).json()["stop_reason"], "max_tokens");
  body["max_tokens"] = 100;
  body["stop_sequences"] = {"82"};
  const Json stopped = server_.post("/v1/messages", body).json();
  EXPECT_EQ(stopped["stop_reason"], "stop_sequence");
  EXPECT_EQ(stopped["stop_sequence"], "82");
}

TEST_F(OtherApis, SystemAndBlocksBecomeTheChatsMessages) {
  Json body = message_body();
  body["system"] = {{{"type", "text"}, {"text", "Be brief."}},
                    {{"type", "text"}, {"text", " Be kind."}}};
  body["messages"] = Json::parse(R"([
    {"role": "user", "content": [{"type": "text", "text": "What is 1 + 1?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "2"}]},
    {"role": "user", "content": "What is 37 + 45?"}])");
  const Json chat = {{"messages", Json::parse(R"([
    {"role": "system", "content": "Be brief. Be kind."},
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "What is 37 + 45?"}])")}};
  const Json expected = server_.post("/tokenize", chat).json()["tokens"];
  EXPECT_EQ(server_.post("/v1/messages/render", body).json()["token_ids"], expected);
  body.erase("max_tokens");
  EXPECT_EQ(server_.post("/v1/messages/count_tokens", body).json()["input_tokens"],
            expected.size());
  EXPECT_EQ(server_.post("/v1/messages", body).status, 400);  // max_tokens is missing
}

// "If the final message uses the assistant role, the response content will continue immediately
// from the content in that message" (Anthropic's reference of messages).
TEST_F(OtherApis, AMessageGoesOnWithTheAssistantsLastText) {
  Json body = message_body();
  body["messages"].push_back({{"role", "assistant"}, {"content", "37 + 45 ="}});
  const HttpAnswer answer = server_.post("/v1/messages", body);
  ASSERT_EQ(answer.status, 200) << answer.body;
  EXPECT_EQ(answer.json()["content"][0]["text"], " 82.");
  body["messages"].back()["content"] = Json::parse(R"([{"type": "text", "text": "37 + 45 ="}])");
  EXPECT_EQ(server_.post("/v1/messages", body).json()["content"][0]["text"], " 82.");
  body["messages"] = Json::parse(R"([{"role": "system", "content": ""}])");
  EXPECT_EQ(server_.post("/v1/messages", body).status, 400);
}

TEST_F(OtherApis, AHashOfEachRequestInTheSystemPromptDoesNotChangeThePrompt) {
  Json plain = message_body(), first = plain;
  plain["system"] = "You are Claude Code.";
  first["system"] = {
      {{"type", "text"},
       {"text", "x-anthropic-billing-header: cc_version=2.1.77; cc_entrypoint=cli; cch=5d3f1;"}},
      {{"type", "text"}, {"text", "You are Claude Code."}}};
  Json second = plain;
  second["system"] =
      "x-anthropic-billing-header: cc_version=2.1.77; cch=00000;\nYou are Claude Code.";
  const Json expected = server_.post("/v1/messages/render", plain).json()["token_ids"];
  EXPECT_FALSE(expected.empty());
  EXPECT_EQ(server_.post("/v1/messages/render", first).json()["token_ids"], expected);
  EXPECT_EQ(server_.post("/v1/messages/render", second).json()["token_ids"], expected);
}

TEST_F(OtherApis, AMessagesErrorsHaveAnthropicsEnvelope) {
  const std::vector<std::pair<std::string, std::string>> refusals = {
      {R"({"max_tokens": 0})", "max_tokens"},
      {R"({"temperature": -1})", "temperature"},
      {R"({"messages": []})", "messages"},
      {R"({"messages": [{"role": "tool", "content": "x"}]})", "messages[0]"},
      {R"({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]})",
       "messages[0].content[0]"},
      {R"({"stop_sequences": 5})", "stop_sequences"},
      {R"({"tools": [{"type": "web_search_20250305", "name": "web_search"}]})", "tools[0]"},
      {R"({"n": 2})", "n is 2"}};
  for (const auto& [change, named] : refusals) {
    Json body = message_body();
    body.update(Json::parse(change));
    const HttpAnswer answer = server_.post("/v1/messages", body);
    EXPECT_EQ(answer.status, 400) << change << answer.body;
    EXPECT_EQ(answer.json()["type"], "error");
    EXPECT_EQ(answer.json()["error"]["type"], "invalid_request_error");
    EXPECT_NE(answer.json()["error"]["message"].get<std::string>().find(named), std::string::npos)
        << answer.body;
  }
  Json body = message_body();
  body["model"] = "other";
  EXPECT_EQ(server_.post("/v1/messages", body).json()["error"]["type"], "not_found_error");
  EXPECT_EQ(server_.get("/v1/messages").json()["type"], "error");
}

TEST_F(OtherApis, AResponseHasTheTextOfTheChat) {
  Json body = chat_body();
  const std::string text = chat_text(body);
  const Json chat = body;
  body.erase("messages");
  body["input"] = "What is 37 + 45?";
  body["store"] = true;
  const HttpAnswer answer = server_.post("/v1/responses", body);
  ASSERT_EQ(answer.status, 200) << answer.body;
  const Json response = answer.json();
  EXPECT_EQ(response["object"], "response");
  EXPECT_EQ(response["status"], "completed");
  EXPECT_EQ(response["store"], false);  // it was not
  ASSERT_EQ(response["output"].size(), 1u);
  EXPECT_EQ(response["output"][0]["content"][0]["type"], "output_text");
  EXPECT_EQ(response["output"][0]["content"][0]["text"], text);
  EXPECT_EQ(response["usage"]["input_tokens"], prompt_length(chat));
  EXPECT_EQ(response["usage"]["input_tokens_details"],
            (Json{{"cached_tokens", 0}, {"cache_write_tokens", 0}}));  // the SDK has both
  body["max_output_tokens"] = 2;
  const Json cut = server_.post("/v1/responses", body).json();
  EXPECT_EQ(cut["status"], "incomplete");
  EXPECT_EQ(cut["incomplete_details"]["reason"], "max_output_tokens");
}

// vLLM's should_continue_final_message().
TEST_F(OtherApis, AResponseGoesOnWithAMessageThatIsIncomplete) {
  Json body = chat_body();
  const std::string whole = chat_text(body);
  body["input"] = body["messages"];
  body.erase("messages");
  const auto text_of = [&](int most) {
    body["max_output_tokens"] = most;
    const Json output = server_.post("/v1/responses", body).json()["output"];
    body["input"].push_back(output[0]);
    return output[0]["content"][0]["text"].get<std::string>();
  };
  const std::string begin = text_of(2);
  EXPECT_EQ(body["input"].back()["status"], "incomplete");
  EXPECT_EQ(begin + text_of(50), whole);
  body["input"].erase(2);
  body["input"][1]["content"] = Json::array();  // nothing to go on with
  EXPECT_EQ(server_.post("/v1/responses", body).status, 200);
}

TEST_F(OtherApis, AResponsesEventsAreNumberedAndAddUpToTheWholeOne) {
  Json body = chat_body();
  body.erase("messages");
  body["input"] = Json::parse(
      R"([{"role": "user", "content": [{"type": "input_text", "text": "What is 37 + 45?"}]}])");
  body["include"] = {"message.output_text.logprobs"};
  Json whole = server_.post("/v1/responses", body).json();
  body["stream"] = true;
  const auto events = named_events(server_.post("/v1/responses", body));
  EXPECT_EQ(
      names(events),
      (std::vector<std::string>{
          "response.created", "response.in_progress", "response.output_item.added",
          "response.content_part.added", "response.output_text.delta", "response.output_text.done",
          "response.content_part.done", "response.output_item.done", "response.completed"}));
  std::string text;
  for (size_t i = 0; i < events.size(); ++i) {
    EXPECT_EQ(events[i].data["sequence_number"], i);
    EXPECT_EQ(events[i].data["type"], events[i].name);
    if (events[i].name == "response.output_text.delta")
      text += events[i].data["delta"].get<std::string>();
    if (events[i].name == "response.output_text.done") {
      EXPECT_EQ(events[i].data["text"], text);
    }
  }
  Json last = events.back().data["response"];
  EXPECT_EQ(last["output"][0]["content"], whole["output"][0]["content"]);
  EXPECT_EQ(last["usage"], whole["usage"]);
  EXPECT_EQ(last["output"][0]["content"][0]["logprobs"].size(), last["usage"]["output_tokens"]);
}

// The required fields of openresponses.org's schema (components/schemas/ResponseResource.json,
// FunctionTool, Reasoning), which clients with types of their own check.
TEST_F(OtherApis, AResponseHasEveryFieldOfTheSpecification) {
  Json body = {{"input", "x"},
               {"max_output_tokens", 2},
               {"reasoning", {{"effort", "low"}}},
               {"text", {{"verbosity", "low"}}},
               {"prompt_cache_key", "k"},
               {"tools", {{{"type", "function"}, {"name", "f"}}}}};
  const auto check = [](const Json& response) {
    for (const char* name : {"id",
                             "object",
                             "created_at",
                             "completed_at",
                             "status",
                             "incomplete_details",
                             "model",
                             "previous_response_id",
                             "instructions",
                             "output",
                             "error",
                             "tools",
                             "tool_choice",
                             "truncation",
                             "parallel_tool_calls",
                             "text",
                             "top_p",
                             "presence_penalty",
                             "frequency_penalty",
                             "top_logprobs",
                             "temperature",
                             "reasoning",
                             "user",
                             "usage",
                             "max_output_tokens",
                             "max_tool_calls",
                             "store",
                             "background",
                             "service_tier",
                             "metadata",
                             "safety_identifier",
                             "prompt_cache_key"})
      EXPECT_TRUE(response.contains(name)) << name;
    for (const char* name : {"name", "description", "parameters", "strict"})
      EXPECT_TRUE(response["tools"][0].contains(name)) << name;
    EXPECT_EQ(response["reasoning"], (Json{{"effort", "low"}, {"summary", nullptr}}));
    EXPECT_EQ(response["text"]["format"]["type"], "text");
    EXPECT_EQ(response["prompt_cache_key"], "k");
  };
  check(server_.post("/v1/responses", body).json());
  body["stream"] = true;
  const auto events = named_events(server_.post("/v1/responses", body));
  check(events.front().data["response"]);
  check(events.back().data["response"]);
}

// Clients that write all fields of the API give the one that asks for nothing, too.
TEST_F(OtherApis, NoTopLogprobsAskForNoLogprobs) {
  const auto shown = [&](const Json& top) {
    const Json body = {{"input", "x"}, {"max_output_tokens", 2}, {"top_logprobs", top}};
    return server_.post("/v1/responses", body).json()["output"][0]["content"][0]["logprobs"].size();
  };
  EXPECT_EQ(shown(nullptr), 0u);
  EXPECT_EQ(shown(0), 0u);
  EXPECT_EQ(shown(1), 2u);
}

TEST_F(OtherApis, WhatNeedsAStoreIsRefusedByName) {
  for (const auto& [change, param] : std::vector<std::pair<std::string, std::string>>{
           {R"({"previous_response_id": "resp_1"})", "previous_response_id"},
           {R"({"background": true})", "background"},
           {R"({"conversation": "c"})", "conversation"},
           {R"({"prompt": {"id": "p"}})", "prompt"},
           {R"({"truncation": "auto"})", "truncation"},
           {R"({"input": null})", "input"},
           {R"({"input": [{"type": "item_reference", "id": "x"}]})", "input"},
           {R"({"input": [{"role": "user", "content": [{"type": "input_image"}]}]})", "input"},
           {R"({"max_output_tokens": 0})", "max_output_tokens"}}) {
    Json body = chat_body();
    body.erase("messages");
    body["input"] = "x";
    body.update(Json::parse(change));
    const HttpAnswer answer = server_.post("/v1/responses", body);
    EXPECT_EQ(answer.status, 400) << change << answer.body;
    EXPECT_EQ(answer.json()["error"]["param"], param) << answer.body;
    if (change.find("item_reference") != std::string::npos) {  // as Vercel's AI SDK sends them
      EXPECT_NE(answer.body.find("store: false"), std::string::npos) << answer.body;
    }
  }
}

TEST_F(OtherApis, ARenderedRequestIsTheTokensAndTheParametersOfTheRequest) {
  Json body = chat_body();
  body["max_completion_tokens"] = 7;
  body["seed"] = 3;
  const Json rendered = server_.post("/v1/chat/completions/render", body).json();
  EXPECT_EQ(rendered["token_ids"], server_.post("/tokenize", body).json()["tokens"]);
  EXPECT_EQ(rendered["sampling_params"]["temperature"], 0);
  EXPECT_EQ(rendered["sampling_params"]["max_tokens"], 7);
  EXPECT_EQ(rendered["sampling_params"]["seed"], 3);
  EXPECT_EQ(rendered["model"], "demo");
  const Json list =
      server_.post("/v1/completions/render", Json{{"prompt", {"23 + 58 =", "Once"}}}).json();
  ASSERT_EQ(list.size(), 2u);
  EXPECT_EQ(list[0]["token_ids"],
            server_.post("/tokenize", Json{{"prompt", "23 + 58 ="}}).json()["tokens"]);
  EXPECT_EQ(server_.post("/v1/completions/render", Json{{"prompt", ""}}).status, 400);
}

TEST(OtherApisTools, ToolsCallsAndResultsBecomeTheChats) {
  server::ServerOptions options;
  options.tool_call_parser = "hermes";
  ServerOnThread server(options);
  const Json chat = Json::parse(R"({
    "messages": [
      {"role": "user", "content": "Weather?"},
      {"role": "assistant", "content": "I look.", "reasoning": "Hm.", "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{\"city\":\"Rome\"}"}}]},
      {"role": "tool", "tool_call_id": "a", "content": "sunny"},
      {"role": "user", "content": "Thanks."}],
    "tools": [{"type": "function", "function": {"name": "weather", "description": "d",
      "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]})");
  Json message = Json::parse(R"({"max_tokens": 5,
    "messages": [
      {"role": "user", "content": "Weather?"},
      {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}}]},
      {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "sunny"}]},
        {"type": "text", "text": "Thanks."}]}],
    "tools": [{"name": "weather", "description": "d",
      "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}],
    "tool_choice": {"type": "auto"}})");
  const Json response = Json::parse(R"({"max_output_tokens": 1,
    "input": [
      {"role": "user", "content": "Weather?"},
      {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
      {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
      {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{\"city\":\"Rome\"}"},
      {"type": "function_call_output", "call_id": "a", "output": "sunny"},
      {"role": "user", "content": "Thanks."}],
    "tools": [{"type": "function", "name": "weather", "description": "d",
      "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]})");
  const HttpAnswer rendered = server.post("/v1/chat/completions/render", chat);
  ASSERT_EQ(rendered.status, 200) << rendered.body;
  const HttpAnswer own = server.post("/v1/messages/render", message);
  ASSERT_EQ(own.status, 200) << own.body;
  EXPECT_EQ(own.json()["token_ids"], rendered.json()["token_ids"]);
  // Claude Code's search for tools; such a result stays in its conversation for ever.
  Json& result = message["messages"][2]["content"][0]["content"];
  result = Json::parse(R"([{"type": "tool_reference", "tool_name": "sunny"}])");
  EXPECT_EQ(server.post("/v1/messages/render", message).json()["token_ids"],
            rendered.json()["token_ids"]);
  result = nullptr;
  EXPECT_EQ(server.post("/v1/messages/render", message).status, 200);
  const HttpAnswer answer = server.post("/v1/responses", response);
  ASSERT_EQ(answer.status, 200) << answer.body;
  EXPECT_EQ(answer.json()["usage"]["input_tokens"], rendered.json()["token_ids"].size());
  const HttpAnswer count = server.post("/v1/responses/input_tokens", response);
  ASSERT_EQ(count.status, 200) << count.body;
  EXPECT_EQ(count.json()["object"], "response.input_tokens");
  EXPECT_EQ(count.json()["input_tokens"], rendered.json()["token_ids"].size());
}

// vLLM takes the result of a tool that gives nothing back, too.
TEST_F(OtherApis, AResultThatIsNullIsAnEmptyOne) {
  Json body = Json::parse(R"({"messages": [
      {"role": "user", "content": "Weather?"},
      {"role": "assistant", "content": null, "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]},
      {"role": "tool", "tool_call_id": "a", "content": null}]})");
  const HttpAnswer null = server_.post("/v1/chat/completions/render", body);
  ASSERT_EQ(null.status, 200) << null.body;
  body["messages"][2]["content"] = "";
  EXPECT_EQ(null.json()["token_ids"],
            server_.post("/v1/chat/completions/render", body).json()["token_ids"]);
  body["messages"][0]["content"] = nullptr;
  EXPECT_EQ(server_.post("/v1/chat/completions/render", body).status, 400);
}

}  // namespace
}  // namespace nanovllm
