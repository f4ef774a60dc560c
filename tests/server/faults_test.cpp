// Clients that leave, stall or vanish, and a server that is told to stop while it works: what
// remains of it.
#include <random>

#include <gtest/gtest.h>

#include "server/client.h"

namespace nanovllm {
namespace {

/// No request is left, and all blocks are free.
bool is_empty(ServerOnThread& server) {
  return server.get("/load").json()["server_load"] == 0 &&
         has_line(server, "vllm:num_requests_running", "", 0) &&
         has_line(server, "vllm:num_requests_waiting", "", 0) &&
         has_line(server, "vllm:kv_cache_usage_perc", "", 0);
}

TEST(Faults, TwoHundredClientsThatLeaveAtAnyMomentLeaveNothingBehind) {
  ServerOnThread server(with_endless());
  std::mt19937 random(20261125);
  const auto below = [&](size_t n) { return random() % n; };
  const std::vector<std::string> paths = {"/v1/chat/completions", "/v1/messages", "/v1/responses"};
  std::vector<std::unique_ptr<Client>> clients;
  const auto leave = [&](Client& client) {
    if (below(2) == 0) client.reset_on_close();
    client.close();
  };
  for (int i = 0; i < 200; ++i) {
    const std::string& path = paths[below(paths.size())];
    Json body = endless_chat(below(2) == 0);
    if (path == "/v1/responses") body["input"] = "Tell me a story.", body.erase("messages");
    if (path == "/v1/messages") body["max_tokens"] = 60000;
    std::string bytes = request_bytes(body, path);
    if (below(4) == 0) bytes.resize(below(bytes.size()));  // within the request
    clients.push_back(std::make_unique<Client>(server.port()));
    clients.back()->send(bytes);
    if (below(4) == 0) leave(*clients.back());  // right behind it
    if (below(3) == 0) clients[below(clients.size())]->receive(0.01);
    if (below(2) == 0) leave(*clients[below(clients.size())]);  // some time later
  }
  for (auto& client : clients) leave(*client);
  EXPECT_TRUE(eventually([&] { return is_empty(server); })) << server.get("/metrics").body;
  // None of them was answered to its end.
  EXPECT_TRUE(has_line(server, "vllm:request_success_total", ",finished_reason=\"length\"", 0))
      << server.get("/metrics").body;
  const HttpAnswer answer = server.post("/v1/chat/completions", chat_body());
  EXPECT_NE(answer.body.find("82"), std::string::npos) << answer.body;
}

TEST(Faults, AClientThatLeavesWhileItsAnswerIsWrittenLeavesNothingBehind) {
  ServerOnThread server;
  Json body = endless_chat(false);
  body.update({{"n", 64}, {"max_tokens", 200}, {"logprobs", true}, {"top_logprobs", 20}});
  Client client(server.port());
  client.send(request_bytes(body));
  ASSERT_TRUE(eventually([&] {
    return has_line(server, "vllm:request_success_total", ",finished_reason=\"length\"", 64);
  }));
  client.close();
  EXPECT_TRUE(eventually([&] { return is_empty(server); })) << server.get("/metrics").body;
  // The first has been written, for nobody, before such a one is.
  EXPECT_EQ(server.post("/v1/chat/completions", body).status, 200);
}

// A peer whose machine has died says nothing any more, and no packet comes back. A filter on the
// client's socket that drops all packets is the same for the server.
TEST(Faults, AClientThatVanishesWithoutAWordLosesItsStream) {
  server::ServerOptions options;
  options.http.write_timeout = 1;
  ServerOnThread server(with_endless(options));
  Client client(server.port());
  client.send(request_bytes(endless_chat(true)));
  ASSERT_TRUE(client.receive());
  if (!client.drop_packets()) GTEST_SKIP() << "a socket filter is not allowed here";
  EXPECT_TRUE(eventually([&] { return is_empty(server); }));
  EXPECT_TRUE(has_line(server, "vllm:request_success_total", ",finished_reason=\"abort\"", 1));
}

// As vLLM's endpoint: ids of answers, or none for all.
TEST(Faults, AbortRequestsEndsThoseThatItNamesAlone) {
  server::ServerOptions options = with_endless();
  options.enable_admin = true;
  ServerOnThread server(options);
  Client one(server.port()), other(server.port());
  one.send(request_bytes(endless_chat(false), "/v1/chat/completions", "X-Request-Id: one\r\n"));
  other.send(request_bytes(endless_chat(false), "/v1/chat/completions", "X-Request-Id: two\r\n"));
  ASSERT_TRUE(eventually([&] { return has_line(server, "vllm:num_requests_running", "", 2); }));
  for (const Json& ids : {Json::array({"chatcmpl-three"}), Json::array({"chatcmpl-one", "x"})})
    EXPECT_EQ(server.post("/abort_requests", {{"request_ids", ids}}).status, 200);
  EXPECT_EQ(one.read_answer().json()["choices"][0]["finish_reason"], "abort");
  for (const char* wrong : {"{", "[]", "{\"request_ids\": 3}"})
    EXPECT_EQ(server.post("/abort_requests", std::string(wrong)).status, 400) << wrong;
  EXPECT_TRUE(has_line(server, "vllm:num_requests_running", "", 1));
  EXPECT_EQ(server.post("/abort_requests", Json::object()).status, 200);
  EXPECT_EQ(other.read_answer().json()["choices"][0]["finish_reason"], "abort");
}

TEST(Faults, WhoReadsALongAnswerSlowlyGetsAllOfIt) {
  server::ServerOptions options;
  options.http.write_timeout = 8;
  ServerOnThread server(options);
  const int64_t mark =
      server.post("/tokenize", Json{{"prompt", "<|im_start|>"}}).json()["tokens"][0];
  const Json body = {{"tokens", std::vector<int64_t>(900000, mark)}};
  Client slow(server.port());
  slow.limit_unread(100000);
  slow.pause = std::chrono::milliseconds(15);  // some 1 MB/s of 10.8 MB
  slow.send(request_bytes(body, "/detokenize"));
  ASSERT_TRUE(slow.receive(300));
  const HttpAnswer answer = slow.read_answer();
  EXPECT_EQ(answer.status, 200);
  EXPECT_EQ(answer.json()["prompt"].get<std::string>().size(), 10800000u);
}

TEST(Faults, ALongAnswerThatIsBeingSentAtSigtermIsSentWhole) {
  ServerOnThread server;
  const int64_t mark =
      server.post("/tokenize", Json{{"prompt", "<|im_start|>"}}).json()["tokens"][0];
  Client slow(server.port());
  slow.limit_unread(100000);
  slow.send(request_bytes({{"tokens", std::vector<int64_t>(900000, mark)}}, "/detokenize"));
  ASSERT_TRUE(slow.receive());
  server.terminate();
  slow.pause = std::chrono::milliseconds(2);  // some 8 MB/s of 10.8 MB
  EXPECT_EQ(slow.read_answer().json()["prompt"].get<std::string>().size(), 10800000u);
  server.stop();
}

/// `count` streams that have begun.
std::vector<std::unique_ptr<Client>> streams(ServerOnThread& server, int count, const Json& body) {
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < count; ++i) {
    clients.push_back(std::make_unique<Client>(server.port()));
    clients.back()->send(request_bytes(body));
  }
  for (auto& client : clients) EXPECT_TRUE(client->receive());
  return clients;
}

TEST(Faults, SigtermUnderLoadLetsAllStreamsEnd) {
  server::ServerOptions options;
  options.shutdown_timeout = 500;
  ServerOnThread server(options);
  Json body = endless_chat(true);
  body["max_tokens"] = 80;
  const auto clients = streams(server, 24, body);
  Client kept(server.port());
  kept.send("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_EQ(kept.read_answer().status, 200);
  server.terminate();
  EXPECT_TRUE(eventually([&] { return !Client(server.port()).connected(); }));
  kept.send(request_bytes(chat_body()));
  const HttpAnswer refused = kept.read_answer();
  if (refused.status != 0) {  // else all had ended
    EXPECT_EQ(refused.status, 503);
    EXPECT_EQ(refused.headers.at("connection"), "close");  // who tries again finds another server
    EXPECT_TRUE(kept.ends());
  }
  for (const auto& client : clients) {
    const HttpAnswer answer = client->read_answer();
    EXPECT_TRUE(answer.body.ends_with("data: [DONE]\n\n")) << answer.body;
    EXPECT_EQ(answer.events().back()["choices"][0]["finish_reason"], "length");
  }
  server.stop();
}

TEST(Faults, ARequestThatIsBeingReadAtSigtermIsServed) {
  for (const char* path : {"/v1/chat/completions", "/tokenize"}) {
    server::ServerOptions options;
    options.trust_request_chat_template = true;
    ServerOnThread server(options);
    Json body = chat_body();
    body["chat_template"] =  // takes long
        "{% for i in range(1000) %}{% for j in range(1500) %}{% if i > j %}{% endif %}{% endfor %}"
        "{% endfor %}{{ messages[0].content }}";
    Client client(server.port());
    client.send(request_bytes(body, path));
    EXPECT_EQ(server.get("/load").json()["server_load"], 1) << path;
    server.terminate();
    const HttpAnswer answer = client.read_answer();
    EXPECT_EQ(answer.status, 200) << path << answer.body;
    server.stop();
  }
}

TEST(Faults, StreamsThatTakeTooLongAfterSigtermGetAnError) {
  server::ServerOptions options;
  options.shutdown_timeout = 0.1;
  ServerOnThread server(with_endless(options));
  const Json body = endless_chat(true);
  const auto clients = streams(server, 8, body);
  server.terminate();
  for (const auto& client : clients) {
    const HttpAnswer answer = client->read_answer();
    EXPECT_TRUE(answer.body.ends_with("data: [DONE]\n\n")) << answer.body;
    EXPECT_EQ(answer.events().back()["error"]["code"], 503);
  }
  server.stop();
  const auto lines = server.requests();
  EXPECT_EQ(lines.size(), 8u);
  for (const std::string& line : lines) EXPECT_TRUE(line.starts_with("503 ")) << line;
}

}  // namespace
}  // namespace nanovllm
