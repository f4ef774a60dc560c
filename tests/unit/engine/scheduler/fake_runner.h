// FakeRunner: stands where the model runner stands, without a model. It keeps the history of tokens
// inside "KV blocks", written at the slots a plan gives and read back through the block tables, and
// derives each next token from what it reads: any mix-up of blocks changes the output.
// expected_output() computes the same function on a request's plain history.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

#include "core/check.h"
#include "engine/scheduler/scheduler.h"

namespace nanovllm {

/// The numbers that stand for the keys and values of one position: they depend on all tokens up to
/// it.
inline uint64_t fake_state(uint64_t previous, int32_t token) {
  uint64_t x = (previous ^ static_cast<uint64_t>(token + 1)) * 0x9e3779b97f4a7c15u;
  x ^= x >> 29;
  x *= 0xbf58476d1ce4e5b9u;
  return x ^ (x >> 32);
}

/// Reads the state of every position, as attention does.
class FakeAttention {
 public:
  void read(uint64_t state) { sum_ = (sum_ ^ state) * 0x94d049bb133111ebu + 1; }
  int32_t token(int vocab_size) const {
    return static_cast<int32_t>((sum_ >> 33) % static_cast<uint64_t>(vocab_size));
  }

 private:
  uint64_t sum_ = 0;
};

/// The tokens that follow `prompt`, up to the first stop token at or after min_tokens.
inline std::vector<int32_t> expected_output(const Sequence& request, int vocab_size) {
  FakeAttention attention;
  uint64_t state = 0;
  const auto take = [&](int32_t token) { attention.read(state = fake_state(state, token)); };
  for (int64_t i = 0; i < request.num_prompt_tokens; ++i) {
    take(request.token_ids[static_cast<size_t>(i)]);
  }
  std::vector<int32_t> output;
  while (std::ssize(output) < request.max_tokens) {
    const int32_t token = attention.token(vocab_size);
    output.push_back(token);
    const bool may_stop = std::ssize(output) >= request.params.min_tokens;
    if (may_stop && std::ranges::count(request.stop_token_ids, token) > 0) break;
    take(token);
  }
  return output;
}

class FakeRunner {
 public:
  FakeRunner(int64_t num_blocks, int block_size, int vocab_size)
      : block_size_(block_size),
        vocab_size_(vocab_size),
        cells_(static_cast<size_t>(num_blocks * block_size)) {}

  /// Copies what the step needs, as a batch builder does when the step is planned, and checks that
  /// its writes hurt nobody.
  void launch(const Plan& plan) {
    Step step;
    for (const ScheduledSequence& entry : plan.sequences) {
      const Sequence& s = *entry.sequence;
      Row row{.request_id = s.request_id,
              .preemptions = s.num_preemptions,
              .start = entry.start,
              .num_tokens = entry.num_tokens,
              .samples = entry.samples,
              .tokens = {},
              .block_table = s.block_table};
      check(entry.num_tokens >= 1 && (!entry.input_on_device || entry.num_tokens == 1),
            "request {}: {} tokens planned", s.request_id, entry.num_tokens);
      const auto first = s.token_ids.begin() + (entry.input_on_device ? 0 : entry.start);
      if (!entry.input_on_device) row.tokens.assign(first, first + entry.num_tokens);
      step.push_back(std::move(row));
    }
    check_writes(step);
    steps_.push_back(std::move(step));
  }

  /// Executes the oldest launched step: the sampled tokens, as process() takes them.
  std::vector<int32_t> run() {
    const Step& step = steps_.front();
    for (const Row& row : step) store(row);  // all rows are stored before any attends
    std::vector<int32_t> sampled;
    for (const Row& row : step) {
      const int32_t token = attend(row);
      if (!row.samples) continue;
      sampled.push_back(token);
      device_tokens_[row.request_id] = token;
    }
    steps_.pop_front();
    return sampled;
  }

 private:
  struct Cell {
    int64_t position = -1;
    int32_t token = -1;
    uint64_t state = 0;
  };
  struct Row {
    int64_t request_id = 0, preemptions = 0;
    int64_t start = 0, num_tokens = 0;
    bool samples = false;
    std::vector<int32_t> tokens;  // empty: on the device
    std::vector<int32_t> block_table;

    bool same_user(const Row& other) const {
      return request_id == other.request_id && preemptions == other.preemptions;
    }
  };
  using Step = std::vector<Row>;

  Cell& cell(const Row& row, int64_t position) {
    const auto index = static_cast<size_t>(position / block_size_);
    check(index < row.block_table.size(), "request {}: no block for position {}", row.request_id,
          position);
    const int64_t slot = int64_t{row.block_table[index]} * block_size_ + position % block_size_;
    return cells_.at(static_cast<size_t>(slot));
  }

  // No row writes a block that another row of this step writes, or that any other user's row of a
  // step in flight may read or write.
  void check_writes(const Step& step) const {
    for (const Row& row : step) {
      const int64_t last = (row.start + row.num_tokens - 1) / block_size_;
      for (int64_t i = row.start / block_size_; i <= last; ++i) {
        const int32_t block = row.block_table.at(static_cast<size_t>(i));
        for (const Step& in_flight : steps_) {
          for (const Row& other : in_flight) {
            check(row.same_user(other) || std::ranges::count(other.block_table, block) == 0,
                  "request {} writes block {}, which request {} uses in a step in flight",
                  row.request_id, block, other.request_id);
          }
        }
        for (const Row& other : step) {
          if (&other == &row) continue;
          const auto it = std::ranges::find(other.block_table, block);
          check(it == other.block_table.end() ||
                    (it - other.block_table.begin() + 1) * block_size_ <= other.start,
                "requests {} and {} write block {}", row.request_id, other.request_id, block);
        }
      }
    }
  }

  void store(const Row& row) {
    for (int64_t i = 0; i < row.num_tokens; ++i) {
      const int64_t position = row.start + i;
      const int32_t token = row.tokens.empty() ? device_tokens_.at(row.request_id)
                                               : row.tokens[static_cast<size_t>(i)];
      const uint64_t previous = position == 0 ? 0 : cell(row, position - 1).state;
      cell(row, position) = {position, token, fake_state(previous, token)};
    }
  }

  int32_t attend(const Row& row) {
    FakeAttention attention;
    for (int64_t position = 0; position < row.start + row.num_tokens; ++position) {
      const Cell& c = cell(row, position);
      check(c.position == position, "request {} reads position {} where it expects {}",
            row.request_id, c.position, position);
      attention.read(c.state);
    }
    return attention.token(vocab_size_);
  }

  int block_size_;
  int vocab_size_;
  std::vector<Cell> cells_;
  std::deque<Step> steps_;
  std::unordered_map<int64_t, int32_t> device_tokens_;  // the last token sampled for each request
};

}  // namespace nanovllm
