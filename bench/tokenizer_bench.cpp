// Tokenizing speed of one thread: tokenizer_bench MODEL_DIRECTORY TEXT_FILE prints one JSON line.
// bench/tokenizer_bench.py runs it beside the Hugging Face library.
#include <algorithm>
#include <cstdio>
#include <ctime>

#include <fmt/format.h>

#include "nanovllm/error.h"
#include "nanovllm/tokenizer.h"

#include "io/json.h"

namespace {

/// CPU seconds of this thread: other programs on the machine do not count.
double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    fmt::print(stderr, "usage: tokenizer_bench MODEL_DIRECTORY TEXT_FILE\n");
    return 2;
  }
  try {
    const std::string text = nanovllm::read_file(argv[2], size_t{1} << 30);
    const double start = cpu_seconds();
    const nanovllm::Tokenizer tokenizer(argv[1]);
    const double load = cpu_seconds() - start;
    double best = 1e9;
    size_t tokens = 0;
    for (int round = 0; round < 5; ++round) {
      const double begin = cpu_seconds();
      tokens = tokenizer.encode(text, false).size();
      best = std::min(best, cpu_seconds() - begin);
    }
    fmt::print("{{\"load_ms\": {:.1f}, \"mb_per_s\": {:.2f}, \"tokens\": {}}}\n", load * 1e3,
               static_cast<double>(text.size()) / best / 1e6, tokens);
  } catch (const nanovllm::Error& error) {
    fmt::print(stderr, "tokenizer_bench: {}\n", error.what());
    return 3;
  }
  return 0;
}
