// Options that the operator sets for all requests.
#include <future>

#include <gtest/gtest.h>

#include "server/client.h"

namespace nanovllm {
namespace {

TEST(ServerOptions, TemplatesGetTheOperatorsVariablesUnlessARequestSaysOtherwise) {
  ServerOnThread plain;
  server::ServerOptions options;
  options.chat_template_kwargs = R"({"add_generation_prompt": false})";
  ServerOnThread server(options);
  const auto count = [](ServerOnThread& of, const Json& more) {
    Json body = chat_body();
    body.update(more);
    return of.post("/tokenize", body).json()["count"].get<int>();
  };
  const int whole = count(plain, Json::object());
  const int without = count(plain, {{"add_generation_prompt", false}});
  ASSERT_LT(without, whole);
  EXPECT_EQ(count(server, Json::object()), without);
  EXPECT_EQ(count(server, {{"chat_template_kwargs", {{"add_generation_prompt", true}}}}), whole);
}

// vLLM's should_include_usage(): whatever the request says.
TEST(ServerOptions, EachChunkHasTheUsageWhereTheOperatorWantsThat) {
  server::ServerOptions options;
  options.force_include_usage = true;
  ServerOnThread server(options);
  Json body = chat_body();
  const Json usage = server.post("/v1/chat/completions", body).json()["usage"];
  body["stream"] = true;
  const auto events = server.post("/v1/chat/completions", body).events();
  EXPECT_EQ(events.back()["usage"], usage);
  for (const Json& event : events) EXPECT_TRUE(event.contains("usage")) << event;
}

TEST(ServerOptions, MetricsMayBeReadWithoutAKeyAndPreflightsNeedNone) {
  server::ServerOptions options;
  options.api_keys = {"secret"};
  options.metrics_without_key = true;
  options.allowed_origins = {"https://example.org"};
  ServerOnThread server(options);
  EXPECT_EQ(server.get("/metrics").status, 200);
  EXPECT_EQ(server.get("/version").status, 401);
  const auto preflight = [&](const std::string& origin) {
    Client client(server.port());
    client.send(
        "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: " + origin +
        "\r\nAccess-Control-Request-Method: POST\r\n"
        "Access-Control-Request-Headers: authorization,content-type,x-stainless-os\r\n\r\n");
    return client.read_answer(/*has_body=*/false);
  };
  const HttpAnswer allowed = preflight("https://example.org");
  EXPECT_EQ(allowed.status, 204);
  EXPECT_EQ(allowed.headers.count("content-length"), 0u);  // RFC 9110, 8.6
  EXPECT_EQ(allowed.headers.at("access-control-allow-origin"), "https://example.org");
  // OpenAI's client in a browser sends headers of its own: the browser asks for each by name.
  EXPECT_EQ(allowed.headers.at("access-control-allow-headers"),
            "authorization,content-type,x-stainless-os");
  const HttpAnswer foreign = preflight("https://example.net");
  EXPECT_EQ(foreign.headers.count("access-control-allow-origin"), 0u);
  EXPECT_EQ(foreign.headers.count("access-control-allow-headers"), 0u);
  EXPECT_EQ(server.get("/version", "Origin: https://example.org\r\n").status, 401);
}

int count_tokens(ServerOnThread& server, const Json& body) {
  const HttpAnswer answer = server.post("/tokenize", body);
  return answer.status == 200 ? answer.json()["count"].get<int>() : -1;
}

TEST(ServerOptions, AChatTemplateOfTheOperatorsReplacesTheModels) {
  server::ServerOptions options;
  options.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}";
  options.chat_template_place = "mine.jinja";
  ServerOnThread server(options);
  EXPECT_EQ(server.post("/tokenize", chat_body()).json()["tokens"],
            server.post("/tokenize", Json{{"prompt", "[What is 37 + 45?]"}}).json()["tokens"]);
  Json body = chat_body();
  body["chat_template"] = "{{ messages[0].content }}";
  const HttpAnswer refused = server.post("/v1/chat/completions", body);
  EXPECT_EQ(refused.status, 400);
  EXPECT_EQ(refused.json()["error"]["param"], "chat_template");
}

TEST(ServerOptions, RequestsMayBringAChatTemplateWhereTheOperatorTrustsThem) {
  server::ServerOptions options;
  options.trust_request_chat_template = true;
  ServerOnThread server(options);
  Json body = chat_body();
  body["chat_template"] = "<{{ messages[0].content }}>";
  EXPECT_EQ(server.post("/tokenize", body).json()["tokens"],
            server.post("/tokenize", Json{{"prompt", "<What is 37 + 45?>"}}).json()["tokens"]);
  body["chat_template"] = "<{{ documents[0].text }}>";  // vLLM's field for templates that have it
  body["documents"] = {{{"text", "Bees hum."}}};
  EXPECT_EQ(server.post("/tokenize", body).json()["tokens"],
            server.post("/tokenize", Json{{"prompt", "<Bees hum.>"}}).json()["tokens"]);
  EXPECT_EQ(server.post("/v1/chat/completions", body).status, 200);
  body["documents"] = "Bees hum.";
  EXPECT_EQ(server.post("/v1/chat/completions", body).status, 400);
  body.erase("documents");
  body["chat_template"] = "<{{ messages[0].content }}>";
  // Text of control tokens stays text under any template.
  body["messages"][0]["content"] = "<|im_end|>";
  EXPECT_GT(count_tokens(server, body), 5);
  for (const char* bad : {"{% for", "", "{{ 1 // 0 }}"}) {
    body["chat_template"] = bad;
    const HttpAnswer refused = server.post("/v1/chat/completions", body);
    EXPECT_EQ(refused.status, 400) << bad;
    EXPECT_EQ(refused.json()["error"]["param"], "chat_template") << refused.body;
  }
}

TEST(ServerOptions, AProxyMayShowTheServerUnderAPath) {
  server::ServerOptions options;
  options.root_path = "/llm";
  ServerOnThread server(options);
  EXPECT_EQ(server.get("/llm/version").status, 200);
  EXPECT_EQ(server.get("/version").status, 200);
  EXPECT_EQ(server.get("/llmversion").status, 404);
  EXPECT_EQ(server.get("/llm/openapi.json").json()["servers"][0]["url"], "/llm");
}

TEST(ServerOptions, PathsMayBeLeftOutOfTheLog) {
  server::ServerOptions options;
  options.unlogged_paths = {"/nowhere", "/v1/completions"};
  ServerOnThread server(options);
  const Json completion = {{"prompt", "x"}, {"max_tokens", 1}};
  EXPECT_EQ(server.get("/nowhere").status, 404);
  EXPECT_EQ(server.post("/v1/completions", completion).status, 200);
  EXPECT_TRUE(server.requests().empty()) << server.requests().front();
  EXPECT_EQ(server.get("/elsewhere").status, 404);
  EXPECT_EQ(server.requests().size(), 1u);
}

TEST(ServerOptions, AKeyHasOnlySoManyRequestsInWork) {
  server::ServerOptions options;
  options.api_keys = {"a", "b"};
  options.max_reqs_per_key = 1;
  ServerOnThread server(with_endless(options));
  const auto ask = [&](const std::string& key) {
    return server.post("/v1/chat/completions", chat_body().dump(),
                       "Authorization: Bearer " + key + "\r\n");
  };
  Client busy(server.port());
  busy.send(
      request_bytes(endless_chat(true), "/v1/chat/completions", "Authorization: Bearer a\r\n"));
  ASSERT_TRUE(busy.receive());
  const HttpAnswer refused = ask("a");
  EXPECT_EQ(refused.status, 429);
  EXPECT_EQ(refused.headers.count("retry-after"), 1u);
  EXPECT_EQ(ask("b").status, 200);
  busy.close();
  EXPECT_TRUE(eventually([&] { return ask("a").status == 200; }));
}

TEST(ServerOptions, ABodyHasOnlySoManyValues) {
  ServerOnThread server;
  std::string body = "{\"prompt\": [0";
  for (int i = 0; i < 1'000'000; ++i) body += ",0";
  const HttpAnswer refused = server.post("/v1/completions", body + "]}");
  EXPECT_EQ(refused.status, 400);
  EXPECT_NE(refused.body.find("more than 1000000 JSON values"), std::string::npos) << refused.body;
}

/// Asks a server within this process.
class Asked final : public server::Exchange {
 public:
  void respond(server::HttpResponse response) override { answer_.set_value(std::move(response)); }
  void begin_stream(const server::Headers&) override {}
  void write(std::string_view) override {}
  void end_stream() override {}
  void on_abandoned(std::function<void()>) override {}
  std::promise<server::HttpResponse> answer_;
};

TEST(ServerOptions, HealthTellsOfAnEngineThatHangs) {
  server::ServerOptions options;
  options.model = std::string(NANOVLLM_SOURCE_DIR) + "/models/demo";
  options.engine.device = "cpu";
  options.engine.num_threads = 1;
  options.http.listens = false;
  options.watchdog_timeout = 0.3;
  std::promise<server::EmbeddedServer> ready;
  std::promise<void> gate;
  const auto opened = gate.get_future().share();
  options.embedding.on_ready = [&](const server::EmbeddedServer& s) { ready.set_value(s); };
  options.embedding.take = [opened](std::vector<RequestOutput>&) { opened.wait(); };
  std::mutex mutex;
  std::string notes;
  server::ServerLog log;
  log.request = [](const std::string&) {};
  log.note = [&](const std::string& line) {
    const std::lock_guard lock(mutex);
    notes += line + "\n";
  };
  std::thread thread([&] { server::serve(options, log); });
  const server::EmbeddedServer server = ready.get_future().get();
  const auto get = [&](const std::string& path) {
    const auto asked = std::make_shared<Asked>();
    auto answer = asked->answer_.get_future();
    server::HttpRequest request;
    request.method = "GET";
    request.path = path;
    server.handle(std::move(request), asked);
    return answer.get();
  };
  const auto turns = [&](int status) {
    return eventually([&] { return get("/health").status == status; });
  };
  EXPECT_EQ(get("/health").status, 200);
  server.llm->add_request(server.llm->new_request_id(), "Once", {.max_tokens = 1});
  EXPECT_TRUE(turns(503));
  EXPECT_NE(get("/health").body.find("no step for 0.3 s"), std::string::npos);
  EXPECT_EQ(get("/livez").status, 200);
  EXPECT_EQ(get("/metrics")
                .body.find("nanovllm:engine_step_age_seconds{model_name=\"" + options.model +
                           "\",engine=\"0\"} 0.0"),
            std::string::npos);
  gate.set_value();
  EXPECT_TRUE(turns(200));
  server.stop();
  thread.join();
  EXPECT_NE(notes.find("no step for 0.3 s: /health answers 503"), std::string::npos) << notes;
}

}  // namespace
}  // namespace nanovllm
