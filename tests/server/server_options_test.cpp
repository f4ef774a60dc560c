// What the operator sets for all requests.
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

TEST(ServerOptions, EveryStreamEndsWithItsUsageWhereTheOperatorWantsThat) {
  server::ServerOptions options;
  options.force_include_usage = true;
  ServerOnThread server(options);
  Json body = chat_body();
  const Json usage = server.post("/v1/chat/completions", body).json()["usage"];
  body["stream"] = true;
  EXPECT_EQ(server.post("/v1/chat/completions", body).events().back()["usage"], usage);
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
    client.send("OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: " + origin +
                "\r\nAccess-Control-Request-Method: POST\r\n\r\n");
    return client.read_answer(/*has_body=*/false);
  };
  const Answer allowed = preflight("https://example.org");
  EXPECT_EQ(allowed.status, 204);
  EXPECT_EQ(allowed.headers.at("access-control-allow-origin"), "https://example.org");
  EXPECT_EQ(preflight("https://example.net").headers.count("access-control-allow-origin"), 0u);
  EXPECT_EQ(server.get("/version", "Origin: https://example.org\r\n").status, 401);
}

}  // namespace
}  // namespace nanovllm
