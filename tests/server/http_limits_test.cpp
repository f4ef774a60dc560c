// HTTP's limits, streams, signals and sockets: each test has a server of its own options.
#include <fstream>

#include <gtest/gtest.h>
#include <sys/un.h>

#include "server/client.h"
#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

TEST(HttpLimits, WhoSendsTooSlowlyIsCutOff) {
  server::ServerOptions options;
  options.http.header_timeout = options.http.body_timeout = 0.6;
  options.http.idle_timeout = 1;
  ServerOnThread server(options);
  Client head(server.port()), body(server.port()), idle(server.port());
  head.send("GET /health HT");
  body.send("POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{");
  EXPECT_EQ(head.read_answer().status, 408);
  EXPECT_TRUE(body.ends());
  EXPECT_TRUE(idle.ends());
  EXPECT_EQ(idle.received(), "");
  EXPECT_TRUE(eventually([&] { return server.get("/health").status == 200; }));
}

TEST(HttpLimits, ARefusedBodyTakesNoOthersPlace) {
  server::ServerOptions options = patient();
  options.http.max_bodies_bytes = 1000;
  ServerOnThread server(options);
  const auto text_of = [](size_t size) {
    return ServerOnThread::request_text("POST", "/tokenize",
                                        "{\"prompt\":\"" + std::string(size - 13, 'a') + "\"}",
                                        "Content-Type: application/json\r\n");
  };
  Client unfinished(server.port()), refused(server.port()), served(server.port());
  unfinished.send(text_of(600).substr(0, text_of(600).size() - 1));
  EXPECT_EQ(server.get("/health").status, 200);  // it has been read by now
  refused.send(text_of(900));
  EXPECT_EQ(refused.read_answer().status, 503);
  served.send(text_of(300));
  EXPECT_EQ(served.read_answer().status, 200);
  unfinished.send("}");
  EXPECT_EQ(unfinished.read_answer().status, 200);
  served.send(text_of(1500));  // alone
  EXPECT_EQ(served.read_answer().status, 200);
}

// RFC 9110, 10.1.1: a final status in place of 100, where the head is enough for it.
TEST(HttpLimits, WhoHasNoKeyTakesNoPlaceWithABody) {
  server::ServerOptions options = patient();
  options.http.max_bodies_bytes = 1000;
  options.api_keys = {"secret"};
  ServerOnThread server(options);
  const auto sent = [&](const std::string& line, const std::string& headers, int status) {
    auto client = std::make_unique<Client>(server.port());
    client->send(line + " HTTP/1.1\r\nHost: localhost\r\n" + headers + "\r\n");
    if (headers.starts_with("Content")) client->send("258\r\n" + std::string(599, 'a'));
    EXPECT_TRUE(client->receive());
    EXPECT_TRUE(client->received().starts_with("HTTP/1.1 " + std::to_string(status)))
        << line << " " << client->received();
    EXPECT_EQ(client->read_answer(status != 204).headers["connection"], "close");
    return client;
  };
  const auto whole = sent("POST /tokenize", "Content-Length: 605\r\n", 401);
  sent("POST /tokenize", "Authorization: Bearer wrong\r\nContent-Length: 605\r\n", 401);
  sent("POST /tokenize", "Expect: 100-continue\r\nContent-Length: 605\r\n", 401);
  const auto chunks =
      sent("POST /tokenize", "Content-Type: a/b\r\nTransfer-Encoding: chunked\r\n", 401);
  const auto open = sent("GET /health", "Content-Length: 605\r\n", 200);
  const auto wrong = sent("POST /health", "Content-Length: 605\r\n", 405);
  Client served(server.port());
  const std::string body = "{\"prompt\":\"" + std::string(887, 'a') + "\"}";
  served.send(ServerOnThread::request_text(
      "POST", "/tokenize", body,
      "Content-Type: application/json\r\nAuthorization: Bearer secret\r\n"));
  EXPECT_EQ(served.read_answer().status, 200);
  for (const auto* client : {&whole, &chunks, &open, &wrong}) EXPECT_TRUE((*client)->ends());
}

TEST(HttpLimits, AConnectionThatIsOneTooManyIsToldSo) {
  server::ServerOptions options;
  options.http.max_connections = 2;
  ServerOnThread server(options);
  const std::string ask = "GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n";
  Client first(server.port()), second(server.port());
  for (Client* client : {&first, &second}) {
    client->send(ask);
    EXPECT_EQ(client->read_answer().status, 200);
  }
  Client third(server.port());
  third.send(ask);
  const HttpAnswer answer = third.read_answer();
  EXPECT_EQ(answer.status, 503);
  EXPECT_EQ(answer.headers.count("retry-after"), 1u);
  EXPECT_NE(answer.body.find("too many connections"), std::string::npos) << answer.body;
  EXPECT_TRUE(third.ends());
  first.send(ask);
  EXPECT_EQ(first.read_answer().status, 200);
  first.close();
  EXPECT_TRUE(eventually([&] { return server.get("/version").status == 200; }));
}

TEST(HttpStream, AClientThatDoesNotReadIsCutOffAndItsRequestEnded) {
  server::ServerOptions options;
  options.http.max_output_bytes = 4096;
  options.http.write_timeout = 1;
  ServerOnThread server(options);
  Json body = chat_body("Tell me a story.");
  body["ignore_eos"] = true;
  body["stream"] = true;
  body["n"] = 64;
  body["logprobs"] = true;
  body["top_logprobs"] = 20;
  Client client(server.port());
  client.send(ServerOnThread::request_text("POST", "/v1/chat/completions", body.dump(),
                                           "Content-Type: application/json\r\n"));
  ASSERT_TRUE(eventually([&] { return !server.requests().empty(); }));
  EXPECT_TRUE(server.requests().back().starts_with("499")) << server.requests().back();
}

// Proxies close connections on which nothing comes: 60 s are usual, and a queue may take longer.
TEST(HttpStream, OneThatWaitsForItsFirstTokenIsKeptAlive) {
  server::ServerOptions options;
  options.engine.max_num_seqs = 1;
  options.sse_keep_alive_interval = 0.05;
  ServerOnThread server(with_endless(options));
  Client endless(server.port());
  endless.send(request_bytes(endless_chat(true)));
  ASSERT_TRUE(endless.receive());
  std::vector<std::unique_ptr<Client>> waiting;
  for (const auto& [path, kept] : std::vector<std::pair<std::string, std::string>>{
           {"/v1/chat/completions", ": keep-alive\n\n"},
           {"/v1/completions", ": keep-alive\n\n"},
           {"/v1/messages", "event: ping\n"}}) {
    Json body = chat_body();
    body.update({{"stream", true}, {"max_tokens", 4}});
    if (path == "/v1/completions") {
      body.erase("messages");
      body["prompt"] = Json::array({"a", "b"});
    }
    waiting.push_back(std::make_unique<Client>(server.port()));
    Client& client = *waiting.back();
    client.send(request_bytes(body, path));
    for (size_t times = 0, at = 0, found; times < 3; ++times, at = found + kept.size())
      while ((found = client.received().find(kept, at)) == std::string::npos)
        ASSERT_TRUE(client.receive()) << path << client.received();
  }
  endless.close();
  for (const auto& client : waiting) {
    const HttpAnswer answer = client->read_answer();
    EXPECT_EQ(answer.status, 200);
    EXPECT_TRUE(answer.body.ends_with("data: [DONE]\n\n") ||
                answer.body.ends_with("data: {\"type\":\"message_stop\"}\n\n"))
        << answer.body;
  }
}

// The last events of a response have all of its text and log probabilities, several times.
TEST(HttpStream, AWriteLargerThanWhatMayWaitReachesAClientThatReads) {
  ServerOnThread server;
  const Json body = {{"input", "Tell me a story."}, {"max_output_tokens", 100},
                     {"ignore_eos", true},          {"stream", true},
                     {"top_logprobs", 20},          {"include", {"message.output_text.logprobs"}}};
  const HttpAnswer answer = server.post("/v1/responses", body);
  ASSERT_TRUE(answer.body.ends_with("\n\n")) << answer.body.size();
  EXPECT_EQ(answer.events().back()["type"], "response.incomplete");
  EXPECT_GT(answer.events().back().dump().size(), server::HttpOptions().max_output_bytes / 2);
}

// A model that is being loaded may take minutes yet.
TEST(HttpSignals, OneThatComesAfterTheStopEndsTheProcess) {
  server::HttpServer server({.port = 0}, nullptr);
  server.on_signal([&](int) { server.stop(); });
  ::raise(SIGTERM);
  server.run();
  struct sigaction now {};
  ::sigaction(SIGTERM, nullptr, &now);
  EXPECT_EQ(now.sa_handler, SIG_DFL);
}

TEST(HttpLocal, ASocketTakesThePlaceOfALeftOneAndOfNoFile) {
  const TempDirectory directory;
  const std::string path = directory.path() / "socket";
  const auto listen = [&path] {
    return std::make_unique<server::HttpServer>(server::HttpOptions{.uds = path}, nullptr);
  };
  std::ofstream(path) << "notes";
  EXPECT_THROW(listen(), Error);
  EXPECT_EQ(std::filesystem::file_size(path), 5u);
  std::filesystem::remove(path);
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  const int left = ::socket(AF_UNIX, SOCK_STREAM, 0);
  ASSERT_EQ(::bind(left, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ::close(left);
  listen();
  EXPECT_FALSE(std::filesystem::exists(path));
  auto ending = listen();
  ending->stop_accepting();
  const auto next = listen();
  ending.reset();  // its requests are answered: the socket is the next one's by now
  EXPECT_TRUE(std::filesystem::exists(path));
}

}  // namespace
}  // namespace nanovllm
