// Names, errors and answers in the forms that clients of OpenAI's and vLLM's servers look for.
#include <gtest/gtest.h>

#include "server/client.h"
#include "server/scripted_model.h"

namespace nanovllm {
namespace {

// Clients of OpenAI's write the slash of a name as %2F. They delete models by this path, too.
TEST(Protocol, AModelIsFoundByItsNameAsClientsSpellIt) {
  server::ServerOptions options;
  options.served_model_names = {"org/demo 1"};
  ServerOnThread server(options);
  for (const char* spelled : {"org/demo%201", "org%2Fdemo%201", "org%2fd%65mo%201"})
    EXPECT_EQ(server.get(std::string("/v1/models/") + spelled).status, 200) << spelled;
  for (const char* other : {"org", "org%2", "org%2Fdemo", "org%2Gdemo%201", "org%252Fdemo%201"})
    EXPECT_EQ(server.get(std::string("/v1/models/") + other).status, 404) << other;
  Client client(server.port());
  client.send("DELETE /v1/models/org%2Fdemo%201 HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_EQ(client.read_answer().status, 405);
}

// vLLM's server sends clients on from a path with a slash at its end; OpenAI's SDK cuts the base
// address's, and other clients do not.
TEST(Protocol, ASlashTooManyInAPathDoesNotMatter) {
  server::ServerOptions options;
  options.served_model_names = {"demo", "demo/"};
  ServerOnThread server(options);
  for (const char* path :
       {"//v1/chat/completions", "/v1//chat/completions", "/v1/chat/completions/"})
    EXPECT_EQ(server.post(path, chat_body()).status, 200) << path;
  EXPECT_EQ(server.get("/v1/models/").json()["data"][1]["id"], "demo/");
  EXPECT_EQ(server.get("/v1/models/demo/").json()["id"], "demo/");
  EXPECT_EQ(server.post("/v1/messages/", Json::object()).json()["type"], "error");
  for (const char* path : {"/v1", "/v1/", "/v1/chat", "/v1/embeddings", "/chat/completions/"})
    EXPECT_EQ(server.get(path).status, 404) << path;
  EXPECT_NE(server.get("/v1/embeddings").body.find("/openapi.json"), std::string::npos);
}

// The SDKs show it as an error's request_id.
TEST(Protocol, ErrorsHaveTheIdOfTheirRequest) {
  ServerOnThread server;
  for (const char* path : {"/v1/chat/completions", "/v1/responses", "/v1/messages"})
    for (const char* body : {"{", "{}", R"({"model": "other"})"}) {
      const HttpAnswer answer = server.post(path, body, "X-Request-Id: mine\r\n");
      EXPECT_GE(answer.status, 400) << path << body;
      EXPECT_EQ(answer.headers.at("x-request-id"), "mine") << path << body;
      EXPECT_EQ(answer.headers.count("request-id"), std::string(path) == "/v1/messages" ? 1u : 0u);
    }
}

// As lm-eval's RemoteTokenizer looks for it: the fields of tokenizer_config.json.
TEST(Protocol, TheTokenizersTokensAndTemplateAreToldWhereTheOperatorLetsThem) {
  server::ServerOptions options;
  EXPECT_EQ(ServerOnThread(options).get("/tokenizer_info").status, 404);
  options.enable_tokenizer_info = true;
  const auto info = [&options] { return ServerOnThread(options).get("/tokenizer_info").json(); };
  std::ifstream file(NANOVLLM_SOURCE_DIR "/models/demo/tokenizer_config.json");
  const Json config = Json::parse(file);
  for (const char* name : {"eos_token", "pad_token", "chat_template"})
    EXPECT_EQ(info()[name], config[name]) << name;
  options.chat_template = "{{ messages[0].content }}";
  EXPECT_EQ(info()["chat_template"], options.chat_template);
}

// Prometheus' text format: a quote, a backslash and an end of line have a backslash before them.
TEST(Protocol, MetricsHaveTheModelsNameEscaped) {
  server::ServerOptions options;
  options.served_model_names = {"de\"m\\o\n"};
  ServerOnThread server(options);
  EXPECT_NE(server.get("/metrics")
                .body.find(R"(vllm:num_requests_running{model_name="de\"m\\o\n",engine="0"} 0)"),
            std::string::npos);
}

// The text's characters as UTF-8 spells them: the demo's tokens of these are single bytes.
TEST(Protocol, OffsetsOfTokensCountCharacters) {
  ServerOnThread server;
  const Json body = {{"prompt", "\u00e9\U0001f600 \u65e5b"},
                     {"temperature", 0},
                     {"max_tokens", 1},
                     {"echo", true},
                     {"logprobs", 0}};
  const Json logprobs = server.post("/v1/completions", body).json()["choices"][0]["logprobs"];
  EXPECT_EQ(logprobs["text_offset"], Json({0, 0, 1, 1, 1, 1, 2, 3, 3, 3, 4, 5}));
  EXPECT_EQ(logprobs["tokens"][10], "b");
}

// As vLLM answers scoring harnesses: the prompt with its log probabilities, and nothing behind it.
TEST(Protocol, AnEchoWithoutTokensIsThePromptAlone) {
  ServerOnThread server;
  Json body = {{"prompt", {"23 + 58 =", "Once"}},
               {"temperature", 0},
               {"max_tokens", 0},
               {"echo", true},
               {"logprobs", 1},
               {"return_token_ids", true}};
  const Json alone = server.post("/v1/completions", body).json()["choices"];
  body["max_tokens"] = 1;
  const Json more = server.post("/v1/completions", body).json()["choices"];
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(alone[i]["text"], body["prompt"][i]);
    EXPECT_EQ(alone[i]["finish_reason"], "length");
    EXPECT_EQ(alone[i]["token_ids"], Json::array());
    for (const char* list : {"tokens", "token_logprobs", "top_logprobs", "text_offset"}) {
      Json expected = more[i]["logprobs"][list];
      expected.erase(expected.size() - 1);
      EXPECT_EQ(alone[i]["logprobs"][list], expected) << list;
    }
  }
  body["max_tokens"] = 0;
  body.erase("echo");
  EXPECT_EQ(server.post("/v1/completions", body).status, 400);
  body.update({{"echo", true}, {"max_tokens", false}});
  EXPECT_EQ(server.post("/v1/completions", body).status, 400);
}

// As OpenAI and vLLM do: the first chunk of each choice begins with its prompt.
TEST(Protocol, AStreamEchoesAsTheWholeAnswerDoes) {
  ServerOnThread server;
  const Json ids = server.post("/tokenize", Json{{"prompt", "Once"}}).json()["tokens"];
  for (const int most : {0, 6})
    for (const Json& prompt : {Json({"23 + 58 =", "Once"}), Json({ids, ids})}) {
      Json body = {{"prompt", prompt},
                   {"temperature", 0.8},
                   {"seed", 1},
                   {"max_tokens", most},
                   {"echo", true},
                   {"logprobs", 1},
                   {"n", 2},
                   {"stream", false},
                   {"return_token_ids", true}};
      const Json whole = server.post("/v1/completions", body).json()["choices"];
      body["stream"] = true;
      const Json none = {{"text", ""}, {"token_ids", Json::array()}};
      Json choices = Json::array({none, none, none, none});
      for (const Json& event : server.post("/v1/completions", body).events()) {
        const Json& news = event["choices"][0];
        Json& choice = choices[news["index"].get<size_t>()];
        choice["text"] = choice["text"].get<std::string>() + news["text"].get<std::string>();
        for (const Json& id : news.value("token_ids", Json::array()))
          choice["token_ids"].push_back(id);
        if (!news["logprobs"].is_null())
          for (const auto& [list, values] : news["logprobs"].items())
            for (const Json& value : values) choice["logprobs"][list].push_back(value);
        choice["finish_reason"] = news["finish_reason"];
      }
      for (size_t i = 0; i < 4; ++i)
        for (const auto& [field, value] : choices[i].items())
          EXPECT_EQ(value, whole[i][field]) << field << " " << i;
    }
}

// As vLLM's protocol has them: beside the choices of a chat, in each choice of a completion.
TEST(Protocol, WhatIsAskedAboutThePromptIsAnswered) {
  ServerOnThread server;
  const Json ids = server.post("/tokenize", chat_body()).json()["tokens"];
  Json body = chat_body();
  body.update({{"prompt_logprobs", 2}, {"return_token_ids", true}, {"max_tokens", 2}});
  const Json chat = server.post("/v1/chat/completions", body).json();
  EXPECT_EQ(chat["prompt_token_ids"], ids);
  EXPECT_EQ(chat["choices"][0]["token_ids"].size(), 2u);
  EXPECT_FALSE(chat["choices"][0].contains("prompt_token_ids"));
  const Json completion =
      server
          .post("/v1/completions",
                Json{{"prompt", {ids, ids}}, {"prompt_logprobs", 2}, {"return_token_ids", true}})
          .json();
  EXPECT_EQ(completion["choices"][1]["prompt_token_ids"], ids);
  for (const Json& list : {chat["prompt_logprobs"], completion["choices"][1]["prompt_logprobs"]}) {
    ASSERT_EQ(list.size(), ids.size());
    EXPECT_TRUE(list[0].is_null());
    for (size_t i = 1; i < list.size(); ++i) {
      const Json& given = list[i].at(std::to_string(ids[i].get<int>()));
      EXPECT_LE(given["logprob"].get<double>(), 0);
      EXPECT_EQ(list[i].size(), given["rank"].get<int>() <= 2 ? 2u : 3u);
      EXPECT_EQ(given["decoded_token"],
                server.post("/detokenize", Json{{"tokens", {ids[i]}}}).json()["prompt"]);
    }
  }
  body["stream"] = true;
  const HttpAnswer refused = server.post("/v1/chat/completions", body);
  EXPECT_EQ(refused.status, 400);
  EXPECT_EQ(refused.json()["error"]["param"], "prompt_logprobs");
  EXPECT_EQ(server.post("/v1/responses", Json{{"input", "x"}, {"prompt_logprobs", 1}}).status, 400);
  body.erase("prompt_logprobs");
  const auto events = server.post("/v1/chat/completions", body).events();
  EXPECT_EQ(events.at(0)["prompt_token_ids"], ids);
  EXPECT_FALSE(events.at(1).contains("prompt_token_ids"));
  const auto texts = server
                         .post("/v1/completions", Json{{"prompt", ids},
                                                       {"stream", true},
                                                       {"max_tokens", 2},
                                                       {"return_token_ids", true}})
                         .events();
  EXPECT_EQ(texts.at(0)["choices"][0]["prompt_token_ids"], ids);
  EXPECT_FALSE(texts.at(1)["choices"][0].contains("prompt_token_ids"));
}

// As in vLLM, where generation_config.json's length is the chats' alone: its completions have
// OpenAI's 16.
TEST(Protocol, AChatWithoutALimitHasTheModelsAndACompletion16Tokens) {
  std::string text;
  for (int i = 1000; i < 1040; ++i) text += std::to_string(i);  // a token each
  const ScriptedModel model(text, "{{ messages[0].content }}");
  for (const int most : {16, 20}) {  // 16 is not taken for none
    std::ofstream(model.path() + "/generation_config.json") << Json{{"max_new_tokens", most}};
    server::ServerOptions options;
    options.model = model.path();
    ServerOnThread server(options);
    const auto tokens_of = [&](const char* path, Json body, const char* name) {
      return server.post(path, body).json()["usage"][name];
    };
    EXPECT_EQ(tokens_of("/v1/completions", {{"prompt", "x"}}, "completion_tokens"), 16);
    Json chat = chat_body("x");
    EXPECT_EQ(tokens_of("/v1/chat/completions", chat, "completion_tokens"), most);
    EXPECT_EQ(tokens_of("/v1/responses", {{"input", "x"}}, "output_tokens"), most);
    chat["max_completion_tokens"] = 25;
    EXPECT_EQ(tokens_of("/v1/chat/completions", chat, "completion_tokens"), 25);
  }
}

// vLLM's should_include_usage(): one without the other asks for nothing.
TEST(Protocol, UsageOfEachChunkIsPartOfIncludeUsage) {
  ServerOnThread server;
  for (const bool include : {false, true}) {
    Json body = chat_body();
    body["stream"] = true;
    body["stream_options"] = {{"continuous_usage_stats", true}, {"include_usage", include}};
    for (const Json& event : server.post("/v1/chat/completions", body).events())
      EXPECT_EQ(event.contains("usage"), include);
  }
}

// vLLM's _consolidate_system_messages(): many templates take no system's message but the first.
TEST(Protocol, TheDevelopersMessagesAreOneWithTheSystems) {
  ServerOnThread server;
  const auto tokens_of = [&](const Json& messages) {
    return server.post("/tokenize", Json{{"messages", messages}}).json()["tokens"];
  };
  const auto said = [](const char* role, const Json& content) {
    return Json{{"role", role}, {"content", content}};
  };
  const Json expected = tokens_of({said("system", "Be brief.\n\nBe kind."), said("user", "Hi")});
  EXPECT_FALSE(expected.is_null());
  const Json part = {{"type", "text"}, {"text", "Be kind."}};
  EXPECT_EQ(tokens_of({said("system", "Be brief."), said("developer", Json::array({part})),
                       said("user", "Hi")}),
            expected);
  EXPECT_EQ(tokens_of({said("developer", "Be brief."), said("user", "Hi"), said("system", ""),
                       said("developer", "Be kind.")}),
            expected);
  const Json image = {{"type", "image_url"}};
  EXPECT_TRUE(tokens_of({said("developer", Json::array({image})), said("user", "Hi")}).is_null());
  // Without a developer the template has its way.
  EXPECT_NE(
      tokens_of({said("system", "Be brief."), said("system", "Be kind."), said("user", "Hi")}),
      expected);
}

// OpenAI's SDK has refusals in an assistant's content; vLLM takes the parts of responses, too.
TEST(Protocol, PartsThatAreTextAreTakenWhateverTheirName) {
  ServerOnThread server;
  const auto tokens_with = [&](const Json& part) {
    Json messages = chat_body()["messages"];
    messages.push_back({{"role", "assistant"}, {"content", Json::array({part})}});
    return server.post("/tokenize", Json{{"messages", messages}}).json()["tokens"];
  };
  const Json expected = tokens_with({{"type", "text"}, {"text", "No."}});
  EXPECT_FALSE(expected.is_null());
  EXPECT_EQ(tokens_with({{"type", "refusal"}, {"refusal", "No."}}), expected);
  EXPECT_EQ(tokens_with({{"type", "input_text"}, {"text", "No."}}), expected);
  EXPECT_EQ(tokens_with({{"type", "output_text"}, {"text", "No."}}), expected);
  EXPECT_TRUE(tokens_with({{"type", "refusal"}}).is_null());
}

TEST(Protocol, ATokenThatTheModelDoesNotHaveIsThePromptsFault) {
  ServerOnThread server;
  const HttpAnswer answer = server.post("/v1/completions", Json{{"prompt", {1, 99999999}}});
  EXPECT_EQ(answer.status, 400);
  EXPECT_EQ(answer.json()["error"]["param"], "prompt") << answer.body;
}

// Agents and gateways shorten a conversation where they find this phrase of OpenAI's and vLLM's.
TEST(Protocol, AContextThatIsTooShortIsSaidAsClientsKnowIt) {
  ServerOnThread server;
  const std::string phrase = "This model's maximum context length is 2048 tokens",
                    words = repeated("a ", 2100);
  const auto expect = [&](const std::string& path, const Json& body, const std::string& param) {
    const HttpAnswer answer = server.post(path, body);
    EXPECT_EQ(answer.status, 400) << path;
    const Json error = answer.json()["error"];
    EXPECT_NE(error["message"].get<std::string>().find(phrase), std::string::npos) << answer.body;
    if (!param.empty()) {
      EXPECT_EQ(error["param"], param) << answer.body;
    }
  };
  expect("/v1/completions", {{"prompt", words}}, "prompt");
  expect("/v1/completions", {{"prompt", repeated(words, 1000)}}, "prompt");
  expect("/v1/completions", {{"prompt", "a"}, {"max_tokens", 2048}}, "max_tokens");
  expect("/v1/chat/completions", {{"messages", {{{"role", "user"}, {"content", words}}}}},
         "messages");
  expect("/v1/responses", {{"input", words}}, "input");
  expect("/v1/messages",
         {{"messages", {{{"role", "user"}, {"content", words}}}}, {"max_tokens", 1}}, "");
}

}  // namespace
}  // namespace nanovllm
