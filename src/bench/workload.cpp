#include "bench/workload.h"

#include <algorithm>
#include <bit>
#include <numeric>

namespace nanovllm::cli {
namespace {

// The generator's reference code (Matsumoto and Nishimura, mt19937ar.c) calls this init_by_array;
// std::mt19937 takes its state from generate() as it is.
class ArraySeed {
 public:
  explicit ArraySeed(std::vector<uint32_t> key) : key_(std::move(key)) {}

  using result_type = uint32_t;
  template <class Iterator>
  void generate(Iterator state, Iterator end) const {
    const auto n = static_cast<size_t>(end - state);
    state[0] = 19650218U;
    for (size_t i = 1; i < n; ++i)
      state[i] = 1812433253U * mix(state[i - 1]) + static_cast<uint32_t>(i);
    size_t i = 1;
    const auto next = [&] {
      if (++i == n) {
        state[0] = state[n - 1];
        i = 1;
      }
    };
    for (size_t k = 0; k < std::max(n, key_.size()); ++k, next()) {
      const size_t j = k % key_.size();
      state[i] = static_cast<uint32_t>((state[i] ^ (mix(state[i - 1]) * 1664525U)) + key_[j] +
                                       static_cast<uint32_t>(j));
    }
    for (size_t k = 0; k < n - 1; ++k, next())
      state[i] = static_cast<uint32_t>((state[i] ^ (mix(state[i - 1]) * 1566083941U)) -
                                       static_cast<uint32_t>(i));
    state[0] = 0x80000000U;
  }

 private:
  static uint32_t mix(uint_fast32_t x) {
    const auto word = static_cast<uint32_t>(x);
    return word ^ (word >> 30);
  }
  std::vector<uint32_t> key_;
};

std::mt19937 seeded(uint64_t seed) {
  std::vector<uint32_t> key = {static_cast<uint32_t>(seed)};
  if (seed >> 32 != 0) key.push_back(static_cast<uint32_t>(seed >> 32));
  ArraySeed sequence(std::move(key));
  return std::mt19937(sequence);
}

}  // namespace

PythonRandom::PythonRandom(uint64_t seed) : engine_(seeded(seed)) {}

int64_t PythonRandom::randint(int64_t low, int64_t high) {
  const auto width = static_cast<uint32_t>(high - low + 1);
  const int bits = std::bit_width(width);
  uint32_t drawn;
  do {
    drawn = static_cast<uint32_t>(engine_()) >> (32 - bits);
  } while (drawn >= width);
  return low + static_cast<int64_t>(drawn);
}

int64_t Workload::prompt_tokens() const {
  return std::accumulate(
      prompts.begin(), prompts.end(), int64_t{0},
      [](int64_t sum, const auto& ids) { return sum + static_cast<int64_t>(ids.size()); });
}

int64_t Workload::output_tokens() const {
  return std::accumulate(max_tokens.begin(), max_tokens.end(), int64_t{0});
}

Workload draw_workload(uint64_t seed, int64_t num_prompts, LengthRange input, LengthRange output,
                       int64_t max_token_id) {
  PythonRandom random(seed);
  Workload workload;
  for (int64_t i = 0; i < num_prompts; ++i) {
    std::vector<int32_t> ids(static_cast<size_t>(random.randint(input.min, input.max)));
    for (int32_t& id : ids) id = static_cast<int32_t>(random.randint(0, max_token_id));
    workload.prompts.push_back(std::move(ids));
  }
  for (int64_t i = 0; i < num_prompts; ++i)
    workload.max_tokens.push_back(random.randint(output.min, output.max));
  return workload;
}

}  // namespace nanovllm::cli
