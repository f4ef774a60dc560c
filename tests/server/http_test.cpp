// HTTP as bytes: what a client may send, and what happens when it sends something else.
#include <ctime>

#include <gtest/gtest.h>

#include "server/client.h"

namespace nanovllm {
namespace {

class Http : public testing::Test {
 protected:
  HttpAnswer ask(const std::string& bytes, bool has_body = true) {
    Client client(server_.port());
    client.send(bytes);
    return client.read_answer(has_body);
  }
  ServerOnThread server_{patient()};
};

TEST_F(Http, WhatIsNoRequestIsRefused) {
  const std::string host = "Host: localhost\r\n";
  const std::vector<std::pair<std::string, int>> cases = {
      {"GARBAGE\r\n\r\n", 400},
      {"\x16\x03\x01\x02\x01\r\n\r\n", 400},
      {"GET /health HTTP/3.7\r\n" + host + "\r\n", 505},
      {"GET /health HTTP/1.1\r\n\r\n", 400},
      {"GET /health HTTP/1.1\r\n" + host + host + "\r\n", 400},
      {"BREW /health HTTP/1.1\r\n" + host + "\r\n", 405},
      {"DELETE /v1/models HTTP/1.1\r\n" + host + "\r\n", 405},
      {"GET /nowhere HTTP/1.1\r\n" + host + "\r\n", 404},
      {"GET /completion HTTP/1.1\r\n" + host + "\r\n", 404},
      {"GET /" + std::string(9000, 'a') + " HTTP/1.1\r\n" + host + "\r\n", 414},
      {"GET /health HTTP/1.1\r\n" + host + "A: " + std::string(20000, 'a') + "\r\n\r\n", 431},
      {"POST /tokenize HTTP/1.1\r\n" + host + "Content-Length: -1\r\n\r\n", 400},
      {"POST /tokenize HTTP/1.1\r\n" + host + "Content-Length: 0x10\r\n\r\n", 400},
      {"POST /tokenize HTTP/1.1\r\n" + host + "Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
       400},
      {"POST /tokenize HTTP/1.1\r\n" + host +
           "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
       400},
      {"POST /tokenize HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\n\r\n-2\r\n", 400},
      {"POST /tokenize HTTP/1.1\r\n" + host + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
       501},
      {"POST /tokenize HTTP/1.1\r\n" + host + "Content-Length: 100001\r\n\r\n", 413},
      {"POST /tokenize HTTP/1.1\r\n" + host +
           "Expect: 100-continue\r\nContent-Length: 100001\r\n\r\n",
       413},
      {"POST /tokenize HTTP/1.1\r\n" + host +
           "Content-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}",
       415},
      {"POST /tokenize HTTP/1.1\r\n" + host +
           "Content-Type: application/json\r\nContent-Encoding: gzip\r\nContent-Length: "
           "2\r\n\r\n{}",
       415}};
  for (const auto& [bytes, status] : cases) {
    const HttpAnswer answer = ask(bytes);
    EXPECT_EQ(answer.status, status) << bytes.substr(0, 200) << answer.body;
    EXPECT_EQ(answer.json()["error"]["code"], status);
  }
  const std::string plain = "Content-Encoding: Identity\r\nContent-Type: application/json\r\n";
  EXPECT_EQ(ask("POST /tokenize HTTP/1.1\r\n" + host + plain +
                "Content-Length: 14\r\n\r\n{\"prompt\":\"x\"}")
                .status,
            200);
  std::string many = "GET /health HTTP/1.1\r\n" + host;
  for (int i = 0; i < 70; ++i) many += "X-" + std::to_string(i) + ": a\r\n";
  EXPECT_EQ(ask(many + "\r\n").status, 431);
  EXPECT_EQ(server_.get("/health").status, 200);
}

// RFC 9110, 15.5.6.
TEST_F(Http, ARefusedMethodIsToldTheAllowedOnes) {
  const auto allowed = [&](const std::string& line) {
    const HttpAnswer answer = ask(line + " HTTP/1.1\r\nHost: localhost\r\n\r\n");
    EXPECT_EQ(answer.status, 405) << line;
    return answer.headers.contains("allow") ? answer.headers.at("allow") : "";
  };
  EXPECT_EQ(allowed("GET /tokenize"), "POST");
  EXPECT_EQ(allowed("DELETE /v1/models"), "GET, HEAD");
  EXPECT_EQ(allowed("DELETE /v1/models/m"), "GET, HEAD");
}

// RFC 9110, 6.6.1.
TEST_F(Http, EveryAnswerHasItsDate) {
  Json stream = chat_body();
  stream["stream"] = true;
  for (const HttpAnswer& answer :
       {server_.get("/health"), server_.get("/nowhere"), ask("GET / HTTP/1.1\r\n\r\n"),
        server_.post("/v1/chat/completions", stream)}) {
    ASSERT_TRUE(answer.headers.contains("date")) << answer.status;
    const std::string date = answer.headers.at("date");
    std::tm time{};
    const char* end = ::strptime(date.c_str(), "%a, %d %b %Y %H:%M:%S GMT", &time);
    ASSERT_TRUE(end && *end == '\0' && date.size() == 29) << date;
    EXPECT_LT(std::abs(std::difftime(::timegm(&time), std::time(nullptr))), 120) << date;
  }
}

// Java's client offers HTTP/2 so with each request (RFC 9110, 7.8: an offer may be ignored).
TEST_F(Http, AnOfferOfHttp2IsIgnored) {
  const std::string body = R"({"prompt": "x"})";
  const std::string head =
      "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
      "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n";
  Client client(server_.port());
  client.send(head + "Transfer-Encoding: chunked\r\n\r\nf\r\n" + body + "\r\n0\r\n\r\n");
  EXPECT_EQ(client.read_answer().status, 200);
  client.send(head + "Content-Length: 15\r\n\r\n" + body);
  EXPECT_EQ(client.read_answer().status, 200);
}

TEST_F(Http, AMethodThatAClientMadeUpIsNoSeriesOfTheMetrics) {
  for (const char* method : {"BREW", "DELETE"})
    EXPECT_EQ(ask(std::string(method) + " /health HTTP/1.1\r\nHost: localhost\r\n\r\n").status,
              405);
  const std::string metrics = server_.get("/metrics").body;
  EXPECT_EQ(metrics.find("BREW"), metrics.npos);
  for (const char* method : {"other", "DELETE"})
    EXPECT_NE(metrics.find(std::string("method=\"") + method + "\",status=\"4xx\"} 1\n"),
              metrics.npos);
}

// RFC 9112, 3.2.2: a server accepts a proxy's form, and takes the host from it.
TEST_F(Http, ATargetMayNameItsHost) {
  const auto ask_for = [&](const std::string& target, const std::string& host) {
    return ask("GET " + target + " HTTP/1.1\r\nHost: " + host + "\r\n\r\n");
  };
  EXPECT_EQ(ask_for("http://localhost:8000/v1/models", "localhost").status, 200);
  EXPECT_EQ(ask_for("HTTPS://[::1]/version?a=http://b/c", "evil.example").status, 200);
  EXPECT_EQ(ask_for("http://evil.example/version", "localhost").status, 403);
  EXPECT_EQ(ask_for("/http://localhost/version", "localhost").status, 404);
  EXPECT_EQ(ask_for("http://localhost?x", "localhost").headers, ask_for("/", "localhost").headers);
}

// RFC 9112, 6.3: the length of such a body is unknown, and its bytes are no next request.
TEST_F(Http, ABodyWhoseLengthIsUnknownEndsTheConnection) {
  for (const std::string coding : {"gzip", "xchunked", "chunked, identity"}) {
    Client client(server_.port());
    client.send("POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: " + coding +
                "\r\n\r\nGET /version HTTP/1.1\r\nHost: localhost\r\n\r\n");
    EXPECT_EQ(client.read_answer().status, 400) << coding;
    EXPECT_TRUE(client.ends()) << coding;
  }
}

// RFC 9110: media types, hosts and their like have no case.
TEST_F(Http, NamesAreTakenInAnyCase) {
  const auto status = [&](const std::string& host, const std::string& type) {
    return ask("POST /tokenize HTTP/1.1\r\nHost: " + host + "\r\nContent-Type: " + type +
               "\r\nContent-Length: 15\r\n\r\n{\"prompt\": \"a\"}")
        .status;
  };
  EXPECT_EQ(status("LocalHost:8000", "Application/JSON; charset=UTF-8"), 200);
  EXPECT_EQ(status("localhost", "application/json;charset=utf-8"), 200);
  EXPECT_EQ(status("localhost", "application/jsonl"), 415);
  EXPECT_EQ(status("local", "application/json"), 403);
}

// As `curl -X POST` and vLLM's benchmarks send it. A browser's has an Origin: a page of another
// site may send it without asking first.
TEST_F(Http, NoBodyNeedsNoTypeButFromABrowser) {
  server::ServerOptions options;
  options.enable_admin = true;
  ServerOnThread server(options);
  const auto status = [&](const std::string& rest) {
    Client client(server.port());
    client.send("POST /reset_prefix_cache HTTP/1.1\r\nHost: localhost\r\n" + rest);
    return client.read_answer().status;
  };
  EXPECT_EQ(status("\r\n"), 200);
  EXPECT_EQ(status("Content-Length: 0\r\n\r\n"), 200);
  EXPECT_EQ(status("Content-Length: 2\r\n\r\n{}"), 415);
  EXPECT_EQ(status("Origin: https://example.org\r\n\r\n"), 415);
  EXPECT_EQ(status("Content-Type: text/plain\r\n\r\n"), 415);
}

TEST_F(Http, ConnectionsAreKeptAndPipelinedRequestsAreAnsweredInOrder) {
  Client client(server_.port());
  client.send(
      "GET /version HTTP/1.1\r\nHost: localhost\r\n\r\nGET /health HTTP/1.1\r\nHost: "
      "localhost\r\n\r\n"
      "GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_EQ(client.read_answer().json()["version"], "1.2.3");
  EXPECT_EQ(client.read_answer().json()["status"], "ok");
  EXPECT_EQ(client.read_answer().status, 404);
  client.send("GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
  EXPECT_EQ(client.read_answer().headers["connection"], "close");
  EXPECT_TRUE(client.ends());
}

// RFC 9112, 2.2.
TEST_F(Http, EmptyLinesBeforeARequestAreIgnored) {
  const std::string request = "GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n";
  Client client(server_.port());
  client.send("\r\n" + request + "\r\n\r\n" + request);
  EXPECT_EQ(client.read_answer().status, 200);
  EXPECT_EQ(client.read_answer().status, 200);
  for (const char c : "\r\n" + request) client.send({&c, 1});
  EXPECT_EQ(client.read_answer().status, 200);
}

TEST_F(Http, ABodyMayComeInChunksOrAfterAContinueOrByteByByte) {
  const std::string body = R"({"prompt": "2 + 3"})";
  const std::string head =
      "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
  const Json expected = server_.post("/tokenize", body).json();
  EXPECT_EQ(ask(head + "Transfer-Encoding: chunked\r\n\r\n5;x=y\r\n" + body.substr(0, 5) +
                "\r\ne\r\n" + body.substr(5) + "\r\n0\r\n\r\n")
                .json(),
            expected);
  Client client(server_.port());
  client.send(head + "Expect: 100-continue\r\nContent-Length: 19\r\n\r\n");
  ASSERT_TRUE(client.receive());
  EXPECT_TRUE(client.received().starts_with("HTTP/1.1 100 "));
  client.send(body);
  EXPECT_EQ(client.read_answer().json(), expected);
  Client old(server_.port());  // HTTP/1.0 has no interim answers
  old.send(
      "POST /tokenize HTTP/1.0\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
      "Content-Length: 19\r\n\r\n");
  old.send(body);
  ASSERT_TRUE(old.receive());
  EXPECT_TRUE(old.received().starts_with("HTTP/1.1 200 ")) << old.received();
  Client slow(server_.port());
  for (const char c : head + "Content-Length: 19\r\n\r\n" + body) slow.send({&c, 1});
  EXPECT_EQ(slow.read_answer().json(), expected);
}

TEST_F(Http, ABodyMayNotComeInTooManyChunks) {
  const auto answer = [&](int chunks) {
    std::string bytes =
        "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Transfer-Encoding: chunked\r\n\r\n";
    for (int i = 0; i < chunks; ++i) bytes += "1\r\n \r\n";
    return ask(bytes + "e\r\n{\"prompt\":\"x\"}\r\n0\r\n\r\n");
  };
  EXPECT_EQ(answer(65535).status, 200);
  const HttpAnswer refused = answer(65536);
  EXPECT_EQ(refused.status, 400);
  EXPECT_NE(refused.body.find("more than 65536 chunks"), std::string::npos) << refused.body;
}

// They count as no byte of the body, and none of the parser's limits is theirs.
TEST_F(Http, HeadsOfChunksAndTrailersAreBounded) {
  const std::string head =
      "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
      "Transfer-Encoding: chunked\r\n\r\n";
  for (const char* begin : {"5;", "0", "2\r\n{}\r\n0\r\nX: "})
    EXPECT_EQ(ask(head + begin + std::string(200000, '0')).status, 431) << begin;
  EXPECT_EQ(ask(head + "e;" + std::string(4000, 'x') +
                "\r\n{\"prompt\":\"x\"}\r\n0\r\nX: " + std::string(4000, 'x') + "\r\n\r\n")
                .status,
            200);
}

TEST_F(Http, HeadIsGetWithoutABody) {
  Client client(server_.port());
  client.send(
      "HEAD /metrics HTTP/1.1\r\nHost: localhost\r\n\r\nGET /version HTTP/1.1\r\nHost: "
      "localhost\r\n\r\n");
  const HttpAnswer head = client.read_answer(/*has_body=*/false);
  EXPECT_EQ(head.status, 200);
  EXPECT_GT(std::stoul(head.headers.at("content-length")), 100u);
  EXPECT_EQ(client.read_answer().json()["version"], "1.2.3");
}

TEST_F(Http, AClientThatEndsItsSideBehindTheRequestGetsItsAnswer) {
  Client client(server_.port());
  client.send(ServerOnThread::request_text("POST", "/v1/chat/completions", chat_body().dump(),
                                           "Content-Type: application/json\r\n"));
  client.end_input();
  const HttpAnswer answer = client.read_answer();
  EXPECT_EQ(answer.status, 200);
  EXPECT_NE(answer.body.find("82"), std::string::npos);
}

TEST_F(Http, ManyIdleConnectionsHurtNobody) {
  std::vector<std::unique_ptr<Client>> idle;
  for (int i = 0; i < 300; ++i) idle.push_back(std::make_unique<Client>(server_.port()));
  EXPECT_EQ(server_.post("/v1/chat/completions", chat_body()).status, 200);
}

}  // namespace
}  // namespace nanovllm
