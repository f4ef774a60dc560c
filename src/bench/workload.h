// nano-vLLM's benchmark workload, drawn exactly as its bench.py draws it with Python's `random`.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace nanovllm::cli {

/// Python's random.Random(seed) for a non-negative seed: the same Mersenne Twister, seeded by the
/// same init_by_array, and randint() by rejection of getrandbits().
class PythonRandom {
 public:
  explicit PythonRandom(uint64_t seed);
  /// Uniform in [low, high]; high - low < 2^32 - 1.
  int64_t randint(int64_t low, int64_t high);

 private:
  std::mt19937 engine_;
};

/// Requests: prompt i asks for max_tokens[i] tokens.
struct Workload {
  std::vector<std::vector<int32_t>> prompts;
  std::vector<int64_t> max_tokens;
  int64_t prompt_tokens() const;
  int64_t output_tokens() const;
};

/// Both ends belong to it.
struct LengthRange {
  int64_t min, max;
};

/// All prompts first (a length, then that many ids in [0, max_token_id]), then all output lengths.
Workload draw_workload(uint64_t seed, int64_t num_prompts, LengthRange input, LengthRange output,
                       int64_t max_token_id);

}  // namespace nanovllm::cli
