// The endpoints: what they answer, whatever else the server does.

#include <gtest/gtest.h>

#include "server/client.h"

namespace nanovllm {
namespace {

#ifdef __SANITIZE_THREAD__
constexpr int kThreads = 1;  // OpenMP's runtime is not instrumented
#else
constexpr int kThreads = 2;
#endif

/// The library's answer to the same conversation.
RequestOutput generated(const Json& body) {
  EngineConfig config;
  config.device = "cpu";
  config.num_threads = kThreads;
  LLM llm(std::string(NANOVLLM_SOURCE_DIR) + "/models/demo", config);
  SamplingParams params = llm.default_sampling_params();
  params.temperature = body.at("temperature").get<double>();
  params.max_tokens = body.value("max_tokens", 2000);
  params.n = body.value("n", 1);
  params.logprobs = 2;
  if (body.contains("seed")) params.seed = body.at("seed").get<int64_t>();
  return llm.generate({llm.chat_prompt(body.at("messages").dump())}, params).front();
}

TEST(Serve, SaysThatItIsReadyAndWhatItServes) {
  ServerOnThread server;
  EXPECT_EQ(server.get("/health").status, 200);
  EXPECT_EQ(server.get("/ping").status, 200);
  EXPECT_EQ(server.get("/livez").status, 200);
  EXPECT_EQ(server.get("/version").json()["version"], "1.2.3");
  const Json models = server.get("/v1/models").json();
  EXPECT_EQ(models["object"], "list");
  EXPECT_EQ(models["data"][0]["id"], "demo");
  EXPECT_EQ(models["data"][0]["max_model_len"], 2048);
  EXPECT_EQ(server.get("/v1/models/demo").json()["id"], "demo");
  EXPECT_EQ(server.get("/v1/models/other").status, 404);
}

TEST(Serve, AChatHasTheBytesOfGenerate) {
  ServerOnThread server;
  Json body = chat_body();
  body["logprobs"] = true;
  body["top_logprobs"] = 2;
  const HttpAnswer answer = server.post("/v1/chat/completions", body);
  ASSERT_EQ(answer.status, 200) << answer.body;
  const Json json = answer.json();
  const RequestOutput expected = generated(body);
  const CompletionOutput& output = expected.outputs[0];
  EXPECT_EQ(json["object"], "chat.completion");
  EXPECT_EQ(json["choices"][0]["message"]["content"], output.text);
  EXPECT_NE(output.text.find("82"), std::string::npos);
  EXPECT_EQ(json["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(json["usage"]["prompt_tokens"], expected.prompt_token_ids.size());
  EXPECT_EQ(json["usage"]["completion_tokens"], output.token_ids.size());
  const Json& content = json["choices"][0]["logprobs"]["content"];
  ASSERT_EQ(content.size(), output.logprobs.size());
  for (size_t i = 0; i < content.size(); ++i) {
    EXPECT_EQ(content[i]["logprob"].get<double>(), output.logprobs[i][0].logprob);
    EXPECT_EQ(content[i]["top_logprobs"].size(), 2u);
  }
}

TEST(Serve, AStreamJoinedIsTheWholeAnswerForEachChoice) {
  ServerOnThread server;
  Json body = chat_body("Tell me a story.");
  body["temperature"] = 0.8;
  body["seed"] = 11;
  body["n"] = 3;
  body["max_tokens"] = 40;
  const Json whole = server.post("/v1/chat/completions", body).json();
  body["stream"] = true;
  body["stream_options"] = {{"include_usage", true}};
  const HttpAnswer answer = server.post("/v1/chat/completions", body);
  ASSERT_EQ(answer.status, 200);
  EXPECT_TRUE(answer.headers.at("content-type").starts_with("text/event-stream"));
  EXPECT_TRUE(answer.body.ends_with("data: [DONE]\n\n"));
  std::map<int, std::string> texts, reasons;
  Json usage;
  EXPECT_TRUE(whole["system_fingerprint"].get<std::string>().starts_with("fp_"));
  for (const Json& event : answer.events()) {
    EXPECT_EQ(event["object"], "chat.completion.chunk");
    EXPECT_EQ(event["system_fingerprint"], whole["system_fingerprint"]);
    if (event["choices"].empty()) usage = event["usage"];
    for (const Json& choice : event["choices"]) {
      const int index = choice["index"];
      if (texts.count(index) == 0) {
        EXPECT_EQ(choice["delta"]["role"], "assistant");
      }
      texts[index] += choice["delta"].value("content", "");
      if (!choice["finish_reason"].is_null()) reasons[index] = choice["finish_reason"];
    }
  }
  const RequestOutput expected = generated(body);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(whole["choices"][i]["message"]["content"], texts[i]);
    EXPECT_EQ(texts[i], expected.outputs[static_cast<size_t>(i)].text);
    EXPECT_EQ(whole["choices"][i]["finish_reason"], reasons[i]);
  }
  EXPECT_EQ(usage, whole["usage"]);
}

TEST(Serve, CompletionsTakeTextsAndIdsAndEchoThem) {
  ServerOnThread server;
  const auto ids = server.post("/tokenize", Json{{"prompt", "23 + 58 ="}}).json()["tokens"];
  const Json body = {{"prompt", {"23 + 58 =", "Once upon a time"}},
                     {"temperature", 0},
                     {"max_tokens", 6},
                     {"echo", true},
                     {"logprobs", 1}};
  const Json both = server.post("/v1/completions", body).json();
  ASSERT_EQ(both["choices"].size(), 2u);
  EXPECT_TRUE(both["choices"][0]["text"].get<std::string>().starts_with("23 + 58 = 81"));
  EXPECT_EQ(both["choices"][1]["index"], 1);
  const Json& logprobs = both["choices"][0]["logprobs"];
  EXPECT_TRUE(logprobs["token_logprobs"][0].is_null());
  EXPECT_EQ(logprobs["tokens"].size(), logprobs["token_logprobs"].size());
  EXPECT_EQ(logprobs["tokens"].size(), logprobs["text_offset"].size());
  const Json by_ids =
      server.post("/v1/completions", Json{{"prompt", ids}, {"temperature", 0}, {"max_tokens", 6}})
          .json();
  EXPECT_EQ(both["choices"][0]["text"],
            "23 + 58 =" + by_ids["choices"][0]["text"].get<std::string>());
  EXPECT_EQ(server.post("/detokenize", Json{{"tokens", ids}}).json()["prompt"], "23 + 58 =");
}

struct Refusal {
  std::string change;  // merged into a chat's body
  int status;
  std::string param;
};

TEST(Serve, WhatIsWrongIsRefusedByNameAndCostsNothingElse) {
  ServerOnThread server;
  const std::vector<Refusal> refusals = {
      {R"({"temperature": -0.1})", 400, "temperature"},
      {R"({"temperature": "0.7"})", 400, "temperature"},
      {R"({"top_p": 0})", 400, "top_p"},
      {R"({"top_k": -2})", 400, "top_k"},
      {R"({"min_p": 2})", 400, "min_p"},
      {R"({"n": 0})", 400, "n"},
      {R"({"n": 1000000000})", 400, "n"},
      {R"({"max_tokens": 0})", 400, "max_tokens"},
      {R"({"max_tokens": 1.5})", 400, "max_tokens"},
      {R"({"max_tokens": 100000})", 400, "max_tokens"},
      {R"({"max_tokens": 3, "max_completion_tokens": 4})", 400, "max_tokens"},
      {R"({"seed": 1.5})", 400, "seed"},
      {R"({"stop": [""]})", 400, "stop"},
      {R"({"stop_token_ids": [99999999]})", 400, "stop_token_ids"},
      {R"({"min_tokens": 5, "max_tokens": 3})", 400, "min_tokens"},
      {R"({"top_logprobs": 3})", 400, "top_logprobs"},
      {R"({"logprobs": true, "top_logprobs": 21})", 400, "top_logprobs"},
      {R"({"stream_options": {"include_usage": true}})", 400, "stream_options"},
      {R"({"messages": []})", 400, "messages"},
      {R"({"messages": [{"role": "root", "content": "x"}]})", 400, "messages"},
      {R"({"messages": [{"role": "user"}]})", 400, "messages"},
      {R"({"messages": [{"role": "user", "content": null}]})", 400, "messages"},
      {R"({"messages": [{"role": "user", "content": 5}]})", 400, "messages"},
      {R"({"messages": [{"role": "tool", "content": {"a": 1}}]})", 400, "messages"},
      {R"({"messages": null})", 400, "messages"},
      {R"({"model": "other"})", 404, "model"},
      {R"({"model": 5})", 400, "model"},
      {R"({"tools": [{"type": "function"}]})", 400, "tools"},
      {R"({"response_format": {"type": "yaml"}})", 400, "response_format"},
      {R"({"guided_json": {}})", 400, "guided_json"},
      {R"({"json_schema": {}})", 400, "json_schema"},
      {R"({"grammar": "root ::= \"a\""})", 400, "grammar"},
      {R"({"typical_p": 0.5})", 400, "typical_p"},
      {R"({"repeat_penalty": 1.1})", 400, "repeat_penalty"},
      {R"({"presence_penalty": 2.01})", 400, "presence_penalty"},
      {R"({"frequency_penalty": -2.01})", 400, "frequency_penalty"},
      {R"({"repetition_penalty": 0})", 400, "repetition_penalty"},
      {R"({"logit_bias": {"abc": 1}})", 400, "logit_bias"},
      {R"({"logit_bias": {"999999999": 1}})", 400, "logit_bias"},
      {R"({"logit_bias": {"5": 101}})", 400, "logit_bias"},
      {R"({"logit_bias": [5]})", 400, "logit_bias"},
      {R"({"bad_words": [""]})", 400, "bad_words"},
      {R"({"allowed_token_ids": []})", 400, "allowed_token_ids"},
      {R"({"allowed_token_ids": [99999999]})", 400, "allowed_token_ids"},
      {R"({"cache_salt": ""})", 400, "cache_salt"},
      {R"({"cache_salt": 5})", 400, "cache_salt"},
      {R"({"priority": 1})", 400, "priority"},
      {R"({"truncate_prompt_tokens": 0})", 400, "truncate_prompt_tokens"},
      {R"({"truncate_prompt_tokens": -2})", 400, "truncate_prompt_tokens"},
      {R"({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}})",
       400, "response_format"},
      {R"({"structured_outputs": {"regex": "("}})", 400, "structured_outputs"},
      {R"({"chat_template": "x"})", 400, "chat_template"},
      {R"({"chat_template_kwargs": {"messages": []}})", 400, "chat_template_kwargs"}};
  for (const Refusal& refusal : refusals) {
    Json body = chat_body();
    body.update(Json::parse(refusal.change));
    const HttpAnswer answer = server.post("/v1/chat/completions", body);
    EXPECT_EQ(answer.status, refusal.status) << refusal.change << answer.body;
    const Json error = answer.json().at("error");
    EXPECT_EQ(error["param"], refusal.param) << refusal.change << answer.body;
    EXPECT_EQ(error["code"], refusal.status);
    EXPECT_EQ(error["type"], refusal.status == 404 ? "NotFoundError" : "BadRequestError");
    EXPECT_LT(answer.body.size(), 2048u);
  }
  for (const std::string text : {"", "null", "[]", "{", "{\"a\":1,}", "{\"messages\": NaN}"})
    EXPECT_EQ(server.post("/v1/chat/completions", text).status, 400) << text;
  // Fields that ask for nothing, or that clients send for their own ends, are no error.
  Json body = chat_body();
  body.update(Json::parse(R"({"presence_penalty": 0.0, "user": "me", "store": false, "foo": 1,
                              "response_format": {"type": "text"}, "tools": [], "n": 1,
                              "logit_bias": {}, "metadata": {}, "frequency_penalty": 0})"));
  const HttpAnswer answer = server.post("/v1/chat/completions", body);
  EXPECT_EQ(answer.status, 200) << answer.body;
  EXPECT_NE(answer.body.find("82"), std::string::npos);
}

TEST(Serve, AFieldThatIsIgnoredIsNotedOnceByItsName) {
  ServerOnThread server;
  Json body = chat_body();
  body["foo\nbar"] = 1;
  body["user"] = "me";
  for (int i = 0; i < 3; ++i) EXPECT_EQ(server.post("/v1/chat/completions", body).status, 200);
  for (int i = 0; i < 100; ++i) body["x" + std::to_string(i)] = 1;
  EXPECT_EQ(server.post("/v1/chat/completions", body).status, 200);
  const auto notes = server.notes();
  EXPECT_EQ(std::ranges::count(notes, "the field \"foo\\nbar\" of requests is ignored"), 1);
  EXPECT_EQ(std::ranges::count(notes, "the field \"user\" of requests is ignored"), 1);
  EXPECT_LT(notes.size(), 80u);  // names are the clients': they are bounded
}

TEST(Serve, TokenizeGivesTheTokensThatAChatWouldHave) {
  ServerOnThread server;
  Json body = chat_body();
  body["messages"].insert(body["messages"].begin(),
                          Json{{"role", "developer"}, {"content", "Be brief."}});
  body["max_tokens"] = 1;
  const Json usage = server.post("/v1/chat/completions", body).json()["usage"];
  const Json tokens = server.post("/tokenize", body).json();
  EXPECT_EQ(tokens["count"], usage["prompt_tokens"]);
  EXPECT_EQ(tokens["tokens"].size(), tokens["count"]);
  const HttpAnswer refused =
      server.post("/tokenize", Json{{"messages", {{{"role", "root"}, {"content", ""}}}}});
  EXPECT_EQ(refused.status, 400);
  EXPECT_EQ(refused.json()["error"]["param"], "messages");
}

TEST(Serve, AFinalMessageIsContinued) {
  ServerOnThread server;
  Json body = chat_body();
  const std::string whole =
      server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"];
  ASSERT_GT(whole.size(), 4u);
  body["messages"].push_back({{"role", "assistant"}, {"content", whole.substr(0, 4)}});
  body["continue_final_message"] = true;
  const HttpAnswer rest = server.post("/v1/chat/completions", body);
  ASSERT_EQ(rest.status, 200) << rest.body;
  EXPECT_EQ(whole.substr(0, 4) + rest.json()["choices"][0]["message"]["content"].get<std::string>(),
            whole);
  body["add_generation_prompt"] = true;
  EXPECT_EQ(server.post("/v1/chat/completions", body).status, 400);
}

TEST(Serve, ABrowserOfAnAllowedOriginMayReadAnswersAndStreams) {
  server::ServerOptions options;
  options.allowed_origins = {"https://example.org"};
  ServerOnThread server(options);
  Json body = chat_body();
  for (const bool stream : {false, true}) {
    body["stream"] = stream;
    const HttpAnswer answer = server.post("/v1/chat/completions", body.dump(),
                                          "Origin: https://example.org\r\nX-Request-Id: abc\r\n");
    EXPECT_EQ(answer.headers.at("access-control-allow-origin"), "https://example.org");
    EXPECT_EQ(answer.headers.at("x-request-id"), "abc");
    EXPECT_EQ(answer.headers.at("vary"), "Origin");
    // Scripts see no other headers: OpenAI's client reads these two.
    EXPECT_EQ(answer.headers.at("access-control-expose-headers"), "X-Request-Id, Retry-After");
  }
}

TEST(Serve, OnlyWhoHasAKeyIsServed) {
  server::ServerOptions options;
  options.api_keys = {"secret", "other"};
  ServerOnThread server(options);
  const std::string body = chat_body().dump();
  for (const std::string path : {"/v1/models", "/metrics", "/version", "/nowhere", "//v1/models",
                                 "/v1/../v1/models", "/V1/models", "/%2fv1/models"})
    EXPECT_EQ(server.get(path).status, 401) << path;
  EXPECT_EQ(server.post("/v1/chat/completions", body).status, 401);
  for (const std::string header :
       {"Authorization: Bearer \r\n", "Authorization: Bearer secre\r\n",
        "Authorization: secret\r\n", "Authorization: Bearer secret2\r\n",
        "Authorization: Bearer secret\r\nAuthorization: Bearer wrong\r\n"})
    EXPECT_EQ(server.get("/v1/models", header).status, 401) << header;
  EXPECT_EQ(server.get("/health").status, 200);
  EXPECT_EQ(server.get("/v1/models", "Authorization: Bearer secret\r\n").status, 200);
  EXPECT_EQ(server.get("/v1/models", "Authorization: bearer secret\r\n").status, 200);
  EXPECT_EQ(server.get("/v1/models", "X-Api-Key: other\r\n").status, 200);
  EXPECT_EQ(server.get("/nowhere", "X-Api-Key: other\r\n").status, 404);
  // A client that has two keys sends both.
  EXPECT_EQ(server.get("/v1/models", "X-Api-Key: x\r\nAuthorization: Bearer other\r\n").status,
            200);
  EXPECT_EQ(server.get("/v1/models", "Authorization: Bearer x\r\nX-Api-Key: other\r\n").status,
            200);
  EXPECT_EQ(server.get("/v1/models", "X-Api-Key: x\r\nAuthorization: Bearer x\r\n").status, 401);
  for (const std::string& line : server.requests())
    EXPECT_EQ(line.find("secret"), std::string::npos) << line;
}

TEST(Serve, PrefixesAreSharedAmongRequestsOfOneKeyAndSaltAlone) {
  server::ServerOptions options;
  options.api_keys = {"one", "two"};
  options.enable_prompt_tokens_details = true;
  ServerOnThread server(options);
  const auto cached = [&](const std::string& key, const std::string& salt) {
    Json body = chat_body();
    body["messages"][0]["content"] = std::string(400, 'a');
    body["max_tokens"] = 1;
    if (!salt.empty()) body["cache_salt"] = salt;
    const HttpAnswer answer =
        server.post("/v1/chat/completions", body.dump(), "Authorization: Bearer " + key + "\r\n");
    EXPECT_EQ(answer.status, 200) << answer.body;
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].get<int>() > 0;
  };
  EXPECT_FALSE(cached("one", ""));
  EXPECT_TRUE(cached("one", ""));
  EXPECT_FALSE(cached("two", ""));
  EXPECT_TRUE(cached("two", ""));
  EXPECT_FALSE(cached("one", "x"));
  EXPECT_TRUE(cached("one", "x"));
  EXPECT_FALSE(cached("two", "x"));
  EXPECT_FALSE(cached("two", "0 x"));
  EXPECT_TRUE(cached("one", ""));
}

TEST(Serve, APageOfAnotherHostIsRefusedOnLoopback) {
  ServerOnThread server;
  const auto ask = [](ServerOnThread& of, const std::string& host, const std::string& more = "") {
    Client client(of.port());
    client.send("GET /v1/models HTTP/1.1\r\nHost: " + host + "\r\n" + more + "\r\n");
    return client.read_answer();
  };
  const HttpAnswer refused = ask(server, "evil.example");
  EXPECT_EQ(refused.status, 403);
  EXPECT_NE(refused.body.find("--api-key"), std::string::npos) << refused.body;
  for (const char* host : {"localhost:8000", "127.0.0.1", "[::1]:8000", "0.0.0.0:8000"})
    EXPECT_EQ(ask(server, host).status, 200) << host;
}

// A tunnel or a proxy on this machine (ngrok, Tailscale, Caddy) passes the outer name on; a page
// that comes to this address by a name of its own has no key.
TEST(Serve, WithAKeyAnyHostIsServedOnLoopback) {
  server::ServerOptions options;
  options.api_keys = {"secret"};
  ServerOnThread server(options);
  for (const auto& [key, status] : {std::pair{"secret", 200}, std::pair{"guess", 401}}) {
    Client client(server.port());
    client.send(std::string("GET /v1/models HTTP/1.1\r\nHost: me.ts.net\r\nX-Api-Key: ") + key +
                "\r\n\r\n");
    EXPECT_EQ(client.read_answer().status, status);
  }
}

TEST(Serve, AClientThatLeavesEndsItsRequestAndFreesItsBlocks) {
  ServerOnThread server(with_endless());
  for (const bool stream : {true, false}) {
    {
      Client client(server.port());
      client.send(request_bytes(endless_chat(stream)));
      ASSERT_TRUE(eventually([&] { return has_line(server, "vllm:num_requests_running", "", 1); }));
    }
    EXPECT_TRUE(eventually([&] { return server.get("/load").json()["server_load"] == 0; }));
    EXPECT_TRUE(eventually([&] { return has_line(server, "vllm:kv_cache_usage_perc", "", 0); }));
    const std::string metrics = server.get("/metrics").body;
    EXPECT_NE(metrics.find("finished_reason=\"abort\"} " + std::to_string(stream ? 1 : 2)),
              std::string::npos)
        << metrics;
  }
}

TEST(Serve, AFullQueueIsSaidWithATimeToRetry) {
  server::ServerOptions options;
  options.engine.max_num_seqs = 1;
  options.queue.max_num_queued_reqs = 2;
  ServerOnThread server(with_endless(options));
  std::vector<std::unique_ptr<Client>> clients;
  const auto ask = [&]() -> Client& {
    clients.push_back(std::make_unique<Client>(server.port()));
    clients.back()->send(request_bytes(endless_chat(false)));
    return *clients.back();
  };
  ask();
  ASSERT_TRUE(eventually([&] { return has_line(server, "vllm:num_requests_running", "", 1); }));
  for (const int waiting : {1, 2}) {
    ask();
    ASSERT_TRUE(
        eventually([&] { return has_line(server, "vllm:num_requests_waiting", "", waiting); }));
  }
  for (int i = 0; i < 8; ++i) {
    const HttpAnswer answer = ask().read_answer();
    ASSERT_EQ(answer.status, 503);
    EXPECT_EQ(answer.headers.at("retry-after"), "1");
    EXPECT_EQ(answer.json()["error"]["type"], "ServiceUnavailableError");
  }
}

// A 503 would have clients try again, and never be served.
TEST(Serve, MoreAnswersThanTheQueueEverHoldsAreA400) {
  server::ServerOptions options;
  options.queue.max_num_queued_reqs = 4;
  ServerOnThread server(options);
  const auto param_of = [&](const Json& body) {
    const HttpAnswer answer = server.post("/v1/completions", body);
    EXPECT_EQ(answer.status, 400) << answer.body;
    return answer.json()["error"]["param"];
  };
  EXPECT_EQ(param_of({{"prompt", {"a", "b", "c", "d", "e"}}}), "prompt");
  EXPECT_EQ(param_of({{"prompt", {"a", "b"}}, {"n", 3}}), "prompt");
  EXPECT_EQ(param_of({{"prompt", "a"}, {"n", 5}}), "n");
  EXPECT_EQ(server.post("/v1/completions", Json{{"prompt", {"a", "b"}}, {"n", 2}}).status, 200);
}

TEST(Serve, StoppingLetsAnAnswerEndAndRefusesNewOnes) {
  auto server = std::make_unique<ServerOnThread>();
  Json body = chat_body("Tell me a story.");
  body["stream"] = true;
  body["max_tokens"] = 150;
  Client client(server->port()), idle(server->port());
  client.send(ServerOnThread::request_text("POST", "/v1/chat/completions", body.dump(),
                                           "Content-Type: application/json\r\n"));
  ASSERT_TRUE(client.receive());
  server->terminate();
  const HttpAnswer answer = client.read_answer();
  EXPECT_TRUE(answer.body.ends_with("data: [DONE]\n\n")) << answer.body;
  server->stop();
  EXPECT_FALSE(Client(server->port()).connected());
}

}  // namespace
}  // namespace nanovllm
