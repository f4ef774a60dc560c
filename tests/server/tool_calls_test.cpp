// Tools and reasoning through the server, on a model that says what the test wants.
#include <algorithm>

#include <gtest/gtest.h>

#include "server/client.h"
#include "server/scripted_model.h"
#include "server/tool_bodies.h"

namespace nanovllm {
namespace {

/// Has the marks of Qwen3's, and shows arguments as it got them.
const std::string kQwenTemplate =
    R"({%- if tools %}<tools>{{ tools | tojson }}</tools> <tool_call>{\"arguments\": ...}</tool_call>{% endif -%}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}
{%- if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is false %}<think>

</think>

{% endif %}{% endif %})";

const std::string kCall =
    "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"東京\", \"days\": "
    "[1, 2]}}\n</tool_call>";
const std::string kArguments = "{\"city\": \"東京\", \"days\": [1, 2]}";
const std::string kAnswer = "<think>\nHm, 天気?\n</think>\n\nLet me see.\n" + kCall;

server::ServerOptions options_for(const ScriptedModel& model) {
  server::ServerOptions options;
  options.model = model.path();
  return options;
}

TEST(Tools, AnAnswerHasItsReasoningItsTextAndItsCalls) {
  const ScriptedModel model(kAnswer, kQwenTemplate);
  ServerOnThread server(options_for(model));
  Json body = body_with_tools();
  body.update(
      {{"tool_choice", "auto"}, {"parallel_tool_calls", true}, {"include_reasoning", true}});
  const HttpAnswer answer = server.post("/v1/chat/completions", body);
  ASSERT_EQ(answer.status, 200) << answer.body;
  for (const std::string& note : server.notes())
    EXPECT_EQ(note.find("ignored"), std::string::npos) << note;
  const Json json = answer.json(), choice = json["choices"][0], message = choice["message"];
  EXPECT_EQ(message["reasoning"], "Hm, 天気?");
  EXPECT_EQ(message["content"], "Let me see.");
  ASSERT_EQ(message["tool_calls"].size(), 1u) << answer.body;
  EXPECT_EQ(message["tool_calls"][0]["type"], "function");
  EXPECT_EQ(message["tool_calls"][0]["function"]["name"], "get_weather");
  EXPECT_EQ(message["tool_calls"][0]["function"]["arguments"], kArguments);
  EXPECT_EQ(choice["finish_reason"], "tool_calls");
  const int64_t reasoning = json["usage"]["completion_tokens_details"]["reasoning_tokens"];
  EXPECT_GT(reasoning, 2);
  EXPECT_LT(reasoning, json["usage"]["completion_tokens"].get<int64_t>() / 2);

  const HttpAnswer stream = server.post("/v1/chat/completions", body_with_tools(true));
  const Json streamed = accumulated(stream.events());
  EXPECT_EQ(streamed["reasoning"], message["reasoning"]);
  EXPECT_EQ(streamed["content"], message["content"]);
  ASSERT_EQ(streamed["tool_calls"].size(), 1u);
  EXPECT_EQ(streamed["tool_calls"][0]["arguments"], kArguments);
  EXPECT_GT(streamed["tool_calls"][0]["pieces"], 5);  // as they came
  EXPECT_EQ(streamed["finish_reason"], "tool_calls");
  EXPECT_EQ(streamed["usage"], json["usage"]);
}

// As vLLM's parsers do, which look for the last mark of the prompt's last turn.
TEST(Tools, AMessageThatEndsInItsReasoningIsContinuedThere) {
  const ScriptedModel model(" and so on.\n</think>\n\nLet me see.", kQwenTemplate);
  ServerOnThread server(options_for(model));
  const auto message_after = [&](const Json& content) {
    const Json messages = {{{"role", "user"}, {"content", "What is <think>?"}},
                           {{"role", "assistant"}, {"content", content}}};
    const Json body = {
        {"messages", messages}, {"continue_final_message", true}, {"temperature", 0}};
    return server.post("/v1/chat/completions", body).json()["choices"][0]["message"];
  };
  const Json parts = Json::array({{{"type", "text"}, {"text", "<think>\nHm"}}});
  for (const Json& content : {Json("<think>\nHm"), parts, Json("<think>a</think>b<think>Hm")}) {
    const Json message = message_after(content);
    EXPECT_EQ(message["reasoning"], " and so on.") << content;
    EXPECT_EQ(message["content"], "Let me see.") << content;
  }
  EXPECT_EQ(message_after("<think>\n")["reasoning"], "and so on.");
  for (const char* content : {"Hm", "<think>a</think>Hm"})
    EXPECT_FALSE(message_after(content).contains("reasoning")) << content;
}

TEST(Tools, ResponsesAndMessagesHaveThemAsItemsAndBlocks) {
  const ScriptedModel model(kAnswer, kQwenTemplate);
  ServerOnThread server(options_for(model));
  Json body = {{"input", "Weather?"}, {"temperature", 0}, {"tools", tools_of()}};
  const Json response = server.post("/v1/responses", body).json();
  ASSERT_EQ(response["output"].size(), 3u) << response.dump();
  EXPECT_EQ(response["output"][0]["content"][0]["text"], "Hm, 天気?");
  EXPECT_EQ(response["output"][1]["content"][0]["text"], "Let me see.");
  EXPECT_EQ(response["output"][2]["arguments"], kArguments);
  EXPECT_GT(response["usage"]["output_tokens_details"]["reasoning_tokens"], 2);
  body = body_with_tools();
  body["max_tokens"] = 500;
  body["tools"] = Json::array({{{"name", "get_weather"}, {"input_schema", {{"type", "object"}}}}});
  const Json message = server.post("/v1/messages", body).json();
  ASSERT_EQ(message["content"].size(), 3u) << message.dump();
  EXPECT_EQ(message["content"][0]["thinking"], "Hm, 天気?");
  EXPECT_EQ(message["content"][2]["input"], Json::parse(kArguments));
  EXPECT_EQ(message["stop_reason"], "tool_use");
}

// Codex sends such tools in every request; llama.cpp's server leaves them out as well.
TEST(Tools, AResponsesToolsThatAreNoFunctionsAreLeftOutAndNoted) {
  const ScriptedModel model(kAnswer, kQwenTemplate);
  ServerOnThread server(options_for(model));
  Json body = {{"input", "Weather?"}, {"temperature", 0}, {"tools", tools_of()}};
  const auto answer_to = [&] {
    const HttpAnswer answer = server.post("/v1/responses", body);
    EXPECT_EQ(answer.status, 200) << answer.body;
    return answer.json();
  };
  const Json plain = answer_to();
  for (const char* type : {"web_search", "custom"})
    body["tools"].push_back({{"type", type}, {"name", "x"}});
  const Json response = answer_to();
  EXPECT_EQ(response["usage"], plain["usage"]);
  EXPECT_EQ(response["output"].size(), plain["output"].size());
  EXPECT_EQ(
      std::ranges::count(server.notes(), "the field \"tools: web_search\" of requests is ignored"),
      1);
  body["tool_choice"] = {{"type", "web_search"}};  // what asks for one gets no other answer
  EXPECT_EQ(server.post("/v1/responses", body).json()["error"]["param"], "tool_choice");
  body["tool_choice"] = "auto";
  body["tools"] = Json::array({{{"type", "web_search"}}});
  EXPECT_LT(answer_to()["usage"]["input_tokens"], plain["usage"]["input_tokens"]);
  body["tools"] = Json::array({{{"type", 5}}});
  EXPECT_EQ(server.post("/v1/responses", body).status, 400);
}

// OpenAI's reference of a function_call: "namespace: the namespace of the function to run", beside
// the name that it has there. A chat has the tools as vLLM's flat_namespace_tool_name() calls them.
TEST(Tools, ANamespacesToolsAreCalledByTheirNamesInIt) {
  std::string said = kAnswer;
  said.replace(said.find("get_weather"), 3, "sky__get");
  const ScriptedModel model(said, kQwenTemplate);
  ServerOnThread server(options_for(model));
  Json tool = tools_of()[0]["function"], chat = body_with_tools();
  tool["type"] = "function";
  const Json space = {{"type", "namespace"},
                      {"name", "sky"},
                      {"description", "The sky."},
                      {"tools", {tool, {{"type", "custom"}, {"name", "exec"}}}}};
  Json call = {{"type", "function_call"},
               {"call_id", "c1"},
               {"name", "get_weather"},
               {"arguments", "{}"},
               {"namespace", "sky"}};
  const Json question = {{"role", "user"}, {"content", "Weather?"}},
             output = {{"type", "function_call_output"}, {"call_id", "c1"}, {"output", "sunny"}},
             later = {{"type", "additional_tools"},
                      {"role", "developer"},
                      {"tools", Json::array({space})}};
  chat["tools"][0]["function"]["name"] = "sky__get_weather";
  chat["tools"][0]["function"]["type"] = "function";
  chat["messages"] = {
      question,
      {{"role", "assistant"},
       {"tool_calls",
        Json::array({{{"id", "c1"},
                      {"type", "function"},
                      {"function", {{"name", "sky__get_weather"}, {"arguments", "{}"}}}}})}},
      {{"role", "tool"}, {"tool_call_id", "c1"}, {"content", "sunny"}}};
  const Json tokens = server.post("/v1/chat/completions/render", chat).json()["token_ids"];
  const auto ask = [&](const Json& input, const Json& tools) {
    const HttpAnswer answer =
        server.post("/v1/responses", {{"input", input}, {"tools", tools}, {"temperature", 0}});
    EXPECT_EQ(answer.status, 200) << answer.body;
    return answer.json();
  };
  for (const Json& response : {ask({question, call, output}, Json::array({space})),
                               ask({question, call, output, later}, nullptr),
                               ask({question, later, call, output, later}, Json::array({space}))}) {
    EXPECT_EQ(response["usage"]["input_tokens"], tokens.size());
    ASSERT_EQ(response["output"].size(), 3u) << response;
    EXPECT_EQ(response["output"][2]["name"], "get_weather");
    EXPECT_EQ(response["output"][2]["namespace"], "sky");
    EXPECT_EQ(response["output"][2]["arguments"], kArguments);
  }
  const Json nameless = {{"type", "namespace"}, {"tools", Json::array({tool})}};
  for (const Json& wrong : {nameless, Json{{"type", "namespace"}, {"name", "sky"}}})
    EXPECT_EQ(server.post("/v1/responses", {{"input", "x"}, {"tools", Json::array({wrong})}})
                  .json()["error"]["param"],
              "tools");
}

TEST(Tools, MarksThatAreSpecialTokensAreSeenAndAnswersKeepTheirs) {
  const ScriptedModel model(
      "Ohoy[TOOL_CALLS]get_wthr[ARGS]" + kArguments,
      "{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}{# [TOOL_CALLS] #}",
      {"[TOOL_CALLS]", "[ARGS]"});
  ServerOnThread server(options_for(model));
  Json body = body_with_tools();
  const Json message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"];
  EXPECT_EQ(message["content"], "Ohoy");
  EXPECT_EQ(message["tool_calls"][0]["function"]["arguments"], kArguments);
  EXPECT_EQ(message["tool_calls"][0]["id"].get<std::string>().size(), 9u);
  body.erase("tools");
  EXPECT_EQ(server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"],
            "Ohoyget_wthr" + kArguments);
}

TEST(Tools, WithoutToolsACallIsTextAndReasoningMayBeLeftOutOrRenamed) {
  const ScriptedModel model(kAnswer, kQwenTemplate);
  server::ServerOptions options = options_for(model);
  options.reasoning_content = true;
  ServerOnThread server(options);
  Json body = body_with_tools();
  for (const bool without : {true, false}) {
    if (without)
      body.erase("tools");
    else
      body["tools"] = tools_of(), body["tool_choice"] = "none";
    const Json choice = server.post("/v1/chat/completions", body).json()["choices"][0];
    EXPECT_EQ(choice["message"]["content"], "Let me see.\n" + kCall);
    EXPECT_EQ(choice["message"]["reasoning_content"], "Hm, 天気?");
    EXPECT_FALSE(choice["message"].contains("tool_calls"));
    EXPECT_EQ(choice["finish_reason"], "stop");
  }
  body["include_reasoning"] = false;
  const Json message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"];
  EXPECT_FALSE(message.contains("reasoning_content") || message.contains("reasoning"));
}

TEST(Tools, ACallThatIsCutOffIsTextInAWholeAnswer) {
  const ScriptedModel model(kCall, kQwenTemplate);
  ServerOnThread server(options_for(model));
  Json body = body_with_tools();
  body["max_tokens"] = 20;
  const Json choice = server.post("/v1/chat/completions", body).json()["choices"][0];
  const std::string content = choice["message"]["content"];
  EXPECT_TRUE(content.starts_with("<tool_call>\n{\"name\"")) << content;
  EXPECT_TRUE(kCall.starts_with(content));
  EXPECT_EQ(choice["finish_reason"], "length");
}

TEST(Tools, AConversationWithCallsReachesTheTemplate) {
  const ScriptedModel model("Fine.", kQwenTemplate);
  ServerOnThread server(options_for(model));
  const Json call = {{"id", "c1"},
                     {"type", "function"},
                     {"function", {{"name", "get_weather"}, {"arguments", kArguments}}}};
  Json body = {{"messages",
                Json::array({{{"role", "user"}, {"content", "Weather?"}},
                             {{"role", "assistant"},
                              {"content", nullptr},
                              {"reasoning_content", "Hm."},
                              {"tool_calls", Json::array({call})}},
                             {{"role", "tool"}, {"tool_call_id", "c1"}, {"content", "sunny"}}})}};
  const Json tokens = server.post("/tokenize", body).json()["tokens"];
  EXPECT_EQ(server.post("/detokenize", {{"tokens", tokens}}).json()["prompt"],
            "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n<think>Hm.</think>"
            "[c1 get_weather 東京]<|im_end|>\n<|im_start|>tool\nsunny(c1)<|im_end|>\n"
            "<|im_start|>assistant\n");
  body["chat_template_kwargs"] = {{"enable_thinking", false}};
  const Json closed = server.post("/tokenize", body).json()["tokens"];
  EXPECT_TRUE(server.post("/detokenize", {{"tokens", closed}})
                  .json()["prompt"]
                  .get<std::string>()
                  .ends_with("<think>\n\n</think>\n\n"));
  body["reasoning_effort"] = "high";  // vLLM: a template's own variable goes before what it implies
  EXPECT_EQ(server.post("/tokenize", body).json()["tokens"], closed);
  body["reasoning_effort"] = "none";
  body.erase("chat_template_kwargs");
  EXPECT_EQ(server.post("/tokenize", body).json()["tokens"], closed);
}

// vLLM's _postprocess_messages(): else an answer that max_tokens cut ends its conversation for
// ever.
TEST(Tools, ACallWhoseArgumentsAreNoObjectLetsItsConversationGoOn) {
  const ScriptedModel model("Fine.", kQwenTemplate);
  ServerOnThread server(options_for(model));
  const auto tokens_with = [&](const Json& arguments) {
    const Json call = {{"id", "c1"},
                       {"type", "function"},
                       {"function", {{"name", "get_weather"}, {"arguments", arguments}}}};
    const Json message = {{"role", "assistant"}, {"tool_calls", Json::array({call})}};
    const HttpAnswer answer = server.post("/tokenize", {{"messages", Json::array({message})}});
    EXPECT_EQ(answer.status, 200) << answer.body;
    return answer.json().value("tokens", Json());
  };
  const Json without = tokens_with("{}");
  for (const Json& arguments :
       {Json("{\"city\": \"東"), Json("{oops"), Json(" "), Json("[1]"), Json("\"x\""), Json("null"),
        Json(), Json(""), Json(5), Json::array({1}), Json(std::string(100, '['))})
    EXPECT_EQ(tokens_with(arguments), without) << arguments;
  EXPECT_NE(tokens_with(kArguments), without);
}

TEST(Tools, WhatCannotBeDoneIsA400ThatNamesTheField) {
  const ScriptedModel model(kAnswer, kQwenTemplate);
  ServerOnThread server(options_for(model));
  const auto refused = [&](const char* field, const Json& value, const char* param,
                           const std::string& words) {
    Json body = body_with_tools();
    body[field] = value;
    const HttpAnswer answer = server.post("/v1/chat/completions", body);
    EXPECT_EQ(answer.status, 400) << field << value;
    EXPECT_EQ(answer.json()["error"]["param"], param) << answer.body;
    EXPECT_NE(answer.body.find(words), std::string::npos) << answer.body;
  };
  refused("tools", 5, "tools", "must be a list");
  refused("tools", Json::array({5}), "tools", "tools[0] must be an object");
  refused("tools", tools_of("no spaces"), "tools", "must have a name");
  refused("tools", tools_of(std::string(129, 'x')), "tools", "must have a name");
  refused("tools", Json::array({tools_of()[0], tools_of()[0]}), "tools", "of another tool");
  refused("tools", Json::array({{{"type", "web_search"}}}), "tools", "web_search");
  refused("tool_choice", "sometimes", "tool_choice", "must be none, auto, required");
  refused("tool_choice", {{"type", "function"}, {"function", {{"name", "other"}}}}, "tool_choice",
          "not among the tools");
  Json body = body_with_tools();
  body["tools"] = tools_of(std::string(128, 'x'));  // Anthropic's limit
  EXPECT_EQ(server.post("/v1/chat/completions", body).status, 200);
  body.erase("tools");
  body["tool_choice"] = "required";
  EXPECT_EQ(server.post("/v1/chat/completions", body).status, 400);
}

TEST(Tools, AModelWhoseTemplateShowsNoCallsTakesNoToolsUnlessItsParserIsNamed) {
  const ScriptedModel model("Hello.", "{% for m in messages %}{{ m.content }}{% endfor %}");
  server::ServerOptions options = options_for(model);
  {
    ServerOnThread server(options);
    const HttpAnswer answer = server.post("/v1/chat/completions", body_with_tools());
    EXPECT_EQ(answer.status, 400);
    EXPECT_NE(answer.body.find("--tool-call-parser"), std::string::npos) << answer.body;
  }
  options.tool_call_parser = "hermes";
  ServerOnThread server(options);
  EXPECT_EQ(server.post("/v1/chat/completions", body_with_tools()).status, 200);
}

}  // namespace
}  // namespace nanovllm
