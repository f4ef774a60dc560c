// A request for which there is no memory costs its own answer alone.
#include <atomic>
#include <cstdlib>
#include <new>

#include <gtest/gtest.h>

#include "server/client.h"

namespace {

// A size that the ids of a prompt take, and nothing else.
constexpr int kIds = 301;
std::atomic<int> until_failure = 0;  // of this size; 0: none fails

}  // namespace

[[gnu::noinline]] void* operator new(size_t size) {
  if (size == kIds * sizeof(int32_t) && until_failure > 0 && --until_failure == 0)
    throw std::bad_alloc();
  if (void* bytes = std::malloc(size)) return bytes;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* bytes) noexcept { std::free(bytes); }
[[gnu::noinline]] void operator delete(void* bytes, size_t) noexcept { std::free(bytes); }

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

}  // namespace
}  // namespace nanovllm
