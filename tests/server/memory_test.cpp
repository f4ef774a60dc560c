// A request for which there is no memory costs its own answer alone, and one that has ended keeps
// none.
#include <atomic>
#include <cstdlib>
#include <new>

#include <gtest/gtest.h>

#include "server/client.h"

namespace {

// A size that the ids of a prompt take, and nothing else.
constexpr int kIds = 301;
std::atomic<int> until_failure = 0;  // of this size; 0: none fails
std::atomic<int64_t> num_kept = 0;   // allocations
std::atomic<int64_t> most_kept = 0;  // at once

void count_one() {
  const int64_t now = ++num_kept;
  for (int64_t most = most_kept; most < now && !most_kept.compare_exchange_weak(most, now);)
    continue;
}

}  // namespace

[[gnu::noinline]] void* operator new(size_t size) {
  if (size == kIds * sizeof(int32_t) && until_failure > 0 && --until_failure == 0)
    throw std::bad_alloc();
  count_one();
  if (void* bytes = std::malloc(size)) return bytes;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(size_t size, const std::nothrow_t&) noexcept {
  count_one();
  return std::malloc(size);
}
[[gnu::noinline]] void operator delete(void* bytes) noexcept {
  if (bytes) --num_kept;
  std::free(bytes);
}
[[gnu::noinline]] void operator delete(void* bytes, size_t) noexcept { operator delete(bytes); }

namespace nanovllm {
namespace {

// The ids are read, kept for the answer, and handed to the engine.
TEST(Memory, APromptThatDoesNotFitIsA500WhereverThatShows) {
  ServerOnThread server;
  const Json body = {{"prompt", std::vector<int>(kIds, 300)}, {"max_tokens", 1}};
  for (int copy = 1; copy <= 3; ++copy) {
    until_failure = copy;
    EXPECT_EQ(server.post("/v1/completions", body).status, 500) << copy;
  }
  EXPECT_EQ(server.post("/v1/completions", body).status, 200);
}

// In JSON a log probability takes several allocations; in an answer and in its text it takes none.
TEST(Memory, AWholeAnswersChoicesAreWrittenOneByOne) {
  ServerOnThread server;
  Json body = chat_body();
  body.update({{"max_tokens", 50}, {"ignore_eos", true}});
  body.update({{"logprobs", true}, {"top_logprobs", 20}});
  const auto most_kept_by = [&](int n) {
    body["n"] = n;
    const int64_t before = most_kept = num_kept.load();
    const std::string text = server.post("/v1/chat/completions", body.dump()).body;
    const int64_t most = most_kept - before;
    EXPECT_EQ(Json::parse(text)["choices"].size(), static_cast<size_t>(n)) << text;
    return most;
  };
  const int64_t one = most_kept_by(1);
  EXPECT_GT(one, 50 * 20);
  EXPECT_LT(most_kept_by(16), 4 * one);
}

TEST(Memory, ADeadlineIsForgottenWithItsRequest) {
  EngineConfig config;
  config.device = "cpu";
  AsyncLLM llm(NANOVLLM_SOURCE_DIR "/models/demo", config, {}, [](std::span<RequestOutput>) {});
  SamplingParams params;
  params.max_tokens = 1;
  const auto kept_after = [&](int requests) {
    for (int i = 0; i < requests; ++i) {
      llm.add_request(llm.new_request_id(), Prompt("Once"), params, {.timeout = 86400});
      EXPECT_TRUE(llm.wait_until_idle(300));
    }
    return num_kept.load();
  };
  const int64_t before = kept_after(20);
  EXPECT_LT(kept_after(400) - before, 200);
}

}  // namespace
}  // namespace nanovllm
