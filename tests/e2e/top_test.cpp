// nanovllm top: what it reads, what it shows, and how it ends.
#include <gtest/gtest.h>

#include "cli/top/frame.h"
#include "e2e/process.h"
#include "e2e/terminal.h"
#include "server/client.h"
#include "server/http/http_client.h"

namespace nanovllm {
namespace {

using cli::Buckets;
using cli::Scrape;

TEST(Scrape, ReadsPrometheusText) {
  const Scrape scrape(
      "# HELP a text\n# TYPE a counter\n"
      "a{model_name=\"demo\",x=\"}\"} 3\na{model_name=\"demo\",x=\"2\"} 4.5 1700000000000\n"
      "plain 1e3\nno_number x\nbroken{\n\nnan NaN\n"
      "h_bucket{le=\"0.1\"} 2\nh_bucket{le=\"+Inf\"} 5\nh_sum 1\nh_count 5\n");
  EXPECT_EQ(scrape.value("a"), 7.5);
  EXPECT_EQ(scrape.value("a", "x=\"2\""), 4.5);
  EXPECT_EQ(scrape.value("plain"), 1000);
  EXPECT_EQ(scrape.value("no_number"), std::nullopt);
  EXPECT_EQ(scrape.value("nan"), std::nullopt);
  EXPECT_EQ(scrape.label("model_name"), "demo");
  EXPECT_EQ(Scrape("a{model_name=\"an \\\"8B\\\" of \\\\x\",x=\"1\"} 3\n").label("model_name"),
            "an \"8B\" of \\x");
  EXPECT_EQ(scrape.buckets("h"), (Buckets{{0.1, 2}, {INFINITY, 5}}));
}

// 50 values up to 2 and 50 up to 4: half of them lie at 2, nine tenths at 2 + 2 * 40 / 50.
TEST(Scrape, AQuantileIsThatOfPrometheus) {
  const Buckets now = {{1, 0}, {2, 50}, {4, 100}, {INFINITY, 100}};
  EXPECT_DOUBLE_EQ(*cli::quantile({}, now, 0.5), 2);
  EXPECT_DOUBLE_EQ(*cli::quantile({}, now, 0.9), 3.6);
  EXPECT_EQ(cli::quantile(now, now, 0.5), std::nullopt);
  EXPECT_DOUBLE_EQ(*cli::quantile({}, {{1, 0}, {INFINITY, 3}}, 0.5), 1);  // beyond all bounds
  const Buckets later = {{1, 10}, {2, 60}, {4, 110}, {INFINITY, 110}};    // ten more, all up to 1
  EXPECT_DOUBLE_EQ(*cli::quantile(now, later, 0.5), 0.5);
}

TEST(Url, IsTakenApartOrRefused) {
  const server::Url plain("localhost:8000");
  EXPECT_EQ(plain.host + "|" + plain.port + "|" + plain.prefix, "localhost|8000|");
  const server::Url whole("https://[::1]/base/");
  EXPECT_TRUE(whole.is_tls);
  EXPECT_EQ(whole.host + "|" + whole.port + "|" + whole.prefix, "::1|443|/base");
  for (const char* bad : {"", "ftp://x", "http://", "http://a:b", "http://a b", "http://u@a",
                          "http://[::1", "http://a:123456", "http://a/\r\nX: y"})
    EXPECT_THROW(server::Url{bad}, Error) << bad;
}

std::string url_of(const ServerOnThread& server) {
  return "http://127.0.0.1:" + std::to_string(server.port());
}

TEST(HttpClient, ReadsWholeAnswersAndBeginningsOfStreams) {
  ServerOnThread server;
  const server::Url url(url_of(server));
  EXPECT_EQ(server::http_get(url, "/health", {}).status, 200);
  EXPECT_EQ(server::http_get(url, "/nowhere", {}).status, 404);
  server::GetOptions live;
  live.until = "\n\n";
  const auto update = server::http_get(url, "/engine/live", live);
  EXPECT_EQ(update.status, 200);
  EXPECT_TRUE(update.body.starts_with("data: {"));
  server::GetOptions endless;
  endless.timeout = 0.3;
  EXPECT_THROW(server::http_get(url, "/engine/live", endless), Error);
}

TEST(Top, FitsFortyColumnsOfPlainText) {
  server::ServerOptions options;
  options.engine.num_gpu_blocks_override = 64;
  ServerOnThread server(options);
  server.post("/v1/chat/completions", chat_body());
  const auto result = nanovllm_program({"top", url_of(server), "--once", "--interval", "0.2"});
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_NE(result.output.find("first token"), std::string::npos) << result.output;
  EXPECT_NE(result.output.find("64 blocks of 64 tokens"), std::string::npos) << result.output;
  Terminal terminal({"top", url_of(server), "--once", "--interval", "0.2"}, 40);
  const std::string text = terminal.rest();
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
  EXPECT_NE(text.find("between two"), std::string::npos) << text;
  for (size_t begin = 0, end; begin < text.size(); begin = end + 1) {
    end = std::min(text.find('\n', begin), text.size());
    EXPECT_LE(end - begin, 41u) << text.substr(begin, end - begin);  // and a carriage return
  }
}

TEST(Top, CtrlCGivesTheTerminalBack) {
  ServerOnThread server;
  Terminal terminal({"top", url_of(server), "--interval", "0.2"}, 60);
  terminal.wait_for("\x1b[?1049h");
  terminal.wait_for("running 0");
  terminal.wait_for("running 0");  // the next frame
  terminal.type("\x03");
  EXPECT_NE(terminal.rest().find("\x1b[?1049l"), std::string::npos);
  EXPECT_EQ(terminal.exit_code(), 0);
}

TEST(Top, WhatIsWrongIsOneLine) {
  server::ServerOptions options;
  options.api_keys = {"secret"};
  ServerOnThread server(options);
  const auto errors_of = [](std::vector<std::string> arguments, int code) {
    const auto result = nanovllm_program(std::move(arguments));
    EXPECT_EQ(result.exit_code, code) << result.errors;
    EXPECT_EQ(std::ranges::count(result.errors, '\n'), 1) << result.errors;
    return result.errors;
  };
  EXPECT_NE(errors_of({"top", url_of(server)}, 2).find("--api-key"), std::string::npos);
  EXPECT_NE(errors_of({"top", "127.0.0.1:1"}, 1).find("127.0.0.1:1 cannot be asked"),
            std::string::npos);
  EXPECT_NE(errors_of({"top", "ftp://x"}, 2).find("http://HOST:PORT"), std::string::npos);
  const auto known = nanovllm_program(
      {"top", url_of(server), "--api-key", "secret", "--once", "--interval", "0.1"});
  EXPECT_EQ(known.exit_code, 0) << known.errors;
}

}  // namespace
}  // namespace nanovllm
