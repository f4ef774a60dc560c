// The page's files, the engine live, and the numbers that boards ask for.
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include <gtest/gtest.h>

#include "server/client.h"
#include "server/monitor/metrics.h"

namespace nanovllm {
namespace {

std::string file_bytes(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream bytes;
  bytes << file.rdbuf();
  return bytes.str();
}

const std::string kGzip = "Accept-Encoding: br, gzip\r\n";

server::ServerOptions with_key() {
  server::ServerOptions options;
  options.api_keys = {"secret"};
  return options;
}

TEST(Page, ItsFilesNeedNoKeyAndAreThoseOfTheFolder) {
  ServerOnThread server(with_key());
  for (const auto& entry : std::filesystem::directory_iterator(NANOVLLM_SOURCE_DIR "/web")) {
    const std::string name = entry.path().filename();
    const std::string path = name == "index.html" ? "/" : "/" + name;
    const HttpAnswer answer = server.get(path, kGzip);
    ASSERT_EQ(answer.status, 200) << path;
    EXPECT_EQ(answer.headers.at("content-encoding"), "gzip");
    ASSERT_GT(answer.body.size(), 18u);
    EXPECT_EQ(answer.body.substr(0, 2), "\x1f\x8b");
    // The last four bytes of a gzip file are the length of what is in it (RFC 1952).
    uint32_t length = 0;
    for (size_t i = 0; i < 4; ++i)
      length |= uint32_t{static_cast<uint8_t>(answer.body[answer.body.size() - 4 + i])} << 8 * i;
    EXPECT_EQ(length, entry.file_size()) << path;
  }
  for (const char* path : {"/marked.js", "/highlight.js"})
    EXPECT_EQ(server.get(path, kGzip).status, 200);
  EXPECT_EQ(server.get("/v1/models").status, 401);
}

TEST(Page, FitsAMegabyteAndNamesNothingFromElsewhere) {
  ServerOnThread server;
  size_t bytes =
      server.get("/marked.js", kGzip).body.size() + server.get("/highlight.js", kGzip).body.size();
  for (const auto& entry : std::filesystem::directory_iterator(NANOVLLM_SOURCE_DIR "/web")) {
    const std::string text = file_bytes(entry.path());
    bytes += text.size();
    for (const char* bad : {"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write",
                            "eval(", "src=\"http", "href=\"http", "url(http", "import('http"})
      EXPECT_EQ(text.find(bad), std::string::npos) << bad << " in " << entry.path();
  }
  EXPECT_LE(bytes, size_t{1} << 20);
}

TEST(Page, APolicyKeepsEverythingElseOut) {
  ServerOnThread server;
  const HttpAnswer page = server.get("/", kGzip);
  EXPECT_TRUE(page.headers.at("content-type").starts_with("text/html"));
  const std::string policy = page.headers.at("content-security-policy");
  for (const char* part : {"default-src 'none'", "script-src 'self'", "style-src 'self'",
                           "connect-src 'self'", "base-uri 'none'", "form-action 'none'",
                           "frame-ancestors 'none'", "require-trusted-types-for 'script'"})
    EXPECT_NE(policy.find(part), std::string::npos) << part;
  EXPECT_EQ(policy.find("unsafe"), std::string::npos);
  EXPECT_EQ(page.headers.at("x-content-type-options"), "nosniff");
  EXPECT_EQ(page.headers.at("referrer-policy"), "no-referrer");
}

TEST(Page, ABrowserThatHasAFileIsToldSo) {
  ServerOnThread server;
  const HttpAnswer first = server.get("/app.js", kGzip);
  EXPECT_EQ(first.headers.at("cache-control"), "no-cache");
  const std::string tag = first.headers.at("etag");
  EXPECT_NE(tag, server.get("/chat.js", kGzip).headers.at("etag"));
  Client client(server.port());
  client.send(
      ServerOnThread::request_text("GET", "/app.js", "", kGzip + "If-None-Match: " + tag + "\r\n"));
  const HttpAnswer again = client.read_answer(/*has_body=*/false);
  EXPECT_EQ(again.status, 304);
  EXPECT_EQ(again.headers.count("content-length"), 0u);
  // The connection goes on behind an answer without a body.
  client.send(ServerOnThread::request_text("GET", "/health", ""));
  EXPECT_EQ(client.read_answer().status, 200);
  EXPECT_EQ(server.get("/app.js", kGzip + "If-None-Match: \"0\"\r\n").status, 200);
  EXPECT_EQ(server.get("/app.js").status, 406);
}

TEST(Page, CanBeTurnedOff) {
  server::ServerOptions options;
  options.no_page = true;
  ServerOnThread server(options);
  EXPECT_EQ(server.get("/", kGzip).status, 404);
  EXPECT_EQ(server.get("/app.js", kGzip).status, 404);
  EXPECT_EQ(server.get("/health").status, 200);
}

/// Updates of /engine/live until `enough`.
template <class Enough>
std::vector<Json> watch(Client& client, const Enough& enough) {
  std::vector<Json> updates;
  size_t at = 0;
  while (client.receive()) {
    const std::string& bytes = client.received();
    for (size_t begin; (begin = bytes.find("data: ", at)) != bytes.npos;) {
      const size_t end = bytes.find("\n\n", begin);
      if (end == bytes.npos) break;
      // A chunk of the transfer encoding is one update.
      updates.push_back(Json::parse(bytes.substr(begin + 6, end - begin - 6)));
      at = end;
      if (enough(updates.back())) return updates;
    }
  }
  ADD_FAILURE() << "the stream ended";
  return updates;
}

/// The values of a list of runs: states, or a block table where each value is one more.
std::vector<int> spread(const Json& runs, bool counts) {
  std::vector<int> values;
  for (size_t i = 0; i < runs.size(); i += 2)
    for (int k = 0; k < runs[i + 1].get<int>(); ++k)
      values.push_back(runs[i].get<int>() + (counts ? k : 0));
  return values;
}

TEST(Live, NeedsTheKey) {
  ServerOnThread server(with_key());
  EXPECT_EQ(server.get("/engine/live").status, 401);
  EXPECT_EQ(server.get("/engine/live?key=secret").status, 401);
}

TEST(Live, ShowsBlocksAndSequencesThatBelongTogether) {
  constexpr int kBlocks = 1024;  // all that four answers of the longest kind take
  server::ServerOptions options = with_endless();
  options.engine.num_gpu_blocks_override = kBlocks;
  options.engine.max_model_len = 16384;
  ServerOnThread server(options);
  Client watcher(server.port()), worker(server.port());
  const auto begin = std::chrono::steady_clock::now();
  watcher.send(ServerOnThread::request_text("GET", "/engine/live", ""));
  Json body = endless_chat(false);
  body["n"] = 4;
  worker.send(request_bytes(body));
  int busy = 0;
  const auto updates =
      watch(watcher, [&](const Json& update) { return (busy += !update["running"].empty()) == 5; });
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  EXPECT_LE(static_cast<double>(updates.size()), 10 * seconds + 2);
  for (const Json& update : updates) {
    const auto states = spread(update["blocks"], false);
    ASSERT_EQ(std::ssize(states), kBlocks);
    const auto idle = std::ranges::count_if(states, [](int state) { return state < 2; });
    EXPECT_EQ(idle, update["stats"]["free_blocks"].get<int>());
    EXPECT_EQ(update["running"].size(), update["stats"]["running"].get<size_t>());
    std::set<int> in_tables;
    for (const Json& sequence : update["running"]) {
      const auto table = spread(sequence["blocks"], true);
      in_tables.insert(table.begin(), table.end());
      const auto room = table.size() * update["info"]["block_size"].get<size_t>();
      EXPECT_GE(room, sequence["computed"].get<size_t>());
    }
    for (const int block : in_tables) EXPECT_GE(states.at(static_cast<size_t>(block)), 2);
    EXPECT_EQ(std::ssize(states) - idle, std::ssize(in_tables));
    EXPECT_EQ(update.dump().find("chatcmpl"), std::string::npos);
    EXPECT_EQ(update.dump().find("story"), std::string::npos);
  }
  worker.close();
  const auto idle = watch(watcher, [](const Json& update) { return update["running"].empty(); });
  EXPECT_EQ(idle.back()["stats"]["free_blocks"], kBlocks);
}

TEST(Live, AnIdleEngineIsShownOnceASecond) {
  ServerOnThread server;
  Client watcher(server.port());
  const auto begin = std::chrono::steady_clock::now();
  watcher.send(ServerOnThread::request_text("GET", "/engine/live", ""));
  int seen = 0;
  watch(watcher, [&](const Json&) { return ++seen == 3; });
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(1900));
}

/// The value of a sample without further labels than every sample has.
double sample(const std::string& page, const std::string& name) {
  const size_t at = page.find("\n" + name + "{");
  EXPECT_NE(at, page.npos) << name;
  const size_t value = page.find("} ", at);
  return at == page.npos ? -1 : std::stod(page.substr(value + 2));
}

TEST(Metrics, EveryGapBetweenTwoTokensCounts) {
  ServerOnThread server;
  Json body = chat_body();
  const auto answered = [&] {
    return server.post("/v1/chat/completions", body)
        .json()["usage"]["completion_tokens"]
        .get<double>();
  };
  const double whole = answered();
  const std::string first = server.get("/metrics").body;
  EXPECT_EQ(sample(first, "vllm:inter_token_latency_seconds_count"), whole - 1);
  EXPECT_EQ(sample(first, "vllm:time_to_first_token_seconds_count"), 1);
  body["stream"] = true;
  server.post("/v1/chat/completions", body);
  const std::string page = server.get("/metrics").body;
  EXPECT_EQ(sample(page, "vllm:inter_token_latency_seconds_count"), 2 * (whole - 1));
  EXPECT_EQ(sample(page, "vllm:request_time_per_output_token_seconds_count"), 2);
  EXPECT_EQ(
      sample(page, "vllm:iteration_tokens_total_sum"),
      sample(page, "vllm:prompt_tokens_total") + sample(page, "vllm:generation_tokens_total"));
  EXPECT_EQ(sample(page, "vllm:iteration_tokens_total_count"), 2 * whole);
}

// As in vLLM, whose IterationStats take a request's phases when it ends with a token.
TEST(Metrics, ARequestWithoutATokenHasNoPhases) {
  server::Metrics metrics;
  RequestOutput aborted;  // while its prompt was computed
  aborted.finished = true;
  aborted.outputs.push_back({.finish_reason = FinishReason::abort});
  aborted.metrics.queue_time = 2;
  aborted.metrics.total_time = 5;
  metrics.add_output(aborted);
  const std::string page = metrics.page("demo", {}, {}, 0);
  EXPECT_EQ(sample(page, "vllm:e2e_request_latency_seconds_sum"), 5);
  for (const std::string phase : {"inference", "prefill", "decode"}) {
    EXPECT_EQ(sample(page, "vllm:request_" + phase + "_time_seconds_sum"), 0) << phase;
    EXPECT_EQ(sample(page, "vllm:request_" + phase + "_time_seconds_count"), 0) << phase;
  }
}

TEST(Grafana, EveryMetricOfTheBoardIsThere) {
  ServerOnThread server;
  server.post("/v1/chat/completions", chat_body());
  const std::string page = server.get("/metrics").body;
  const std::string board = file_bytes(NANOVLLM_SOURCE_DIR "/deploy/grafana/nanovllm.json");
  ASSERT_EQ(Json::parse(board)["title"], "nano-vllm.cpp");
  int names = 0;
  for (size_t at = 0; (at = board.find("vllm:", at)) != board.npos; ++names) {
    const size_t end = board.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_", at + 5);
    const std::string name = board.substr(at, end - at);
    EXPECT_NE(page.find("\n" + name + "{"), page.npos) << name;
    at = end;
  }
  EXPECT_GE(names, 20);
}

}  // namespace
}  // namespace nanovllm
