// Shared by the scheduler's tests: small configurations, sequences made of counted tokens, and
// ways to step. Functions are inline because each test is a program of its own.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <numeric>

#include <gtest/gtest.h>

#include "engine/scheduler/scheduler.h"
#include "unit/engine/scheduler/fake_runner.h"
#include "unit/engine/scheduler/integrity.h"

namespace nanovllm {

using Tokens = std::vector<int32_t>;

inline SchedulerConfig small_config(int64_t num_blocks = 16, int block_size = 4) {
  SchedulerConfig config;
  config.num_blocks = num_blocks;
  config.block_size = block_size;
  config.max_model_len = 1000;
  config.max_num_seqs = 8;
  config.max_num_batched_tokens = 64;
  return config;
}

/// `count` tokens from `first` on.
inline Tokens count_up(int count, int32_t first = 100) {
  Tokens tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

inline std::unique_ptr<Sequence> make_sequence(int64_t id, Tokens prompt, int64_t max_tokens = 8) {
  auto sequence = std::make_unique<Sequence>();
  sequence->request_id = id;
  sequence->token_ids = std::move(prompt);
  sequence->num_prompt_tokens = sequence->num_tokens();
  sequence->max_tokens = max_tokens;
  return sequence;
}

/// A scheduler with its sequences, which tests name by the ids of their requests.
class OwningScheduler : public Scheduler {
 public:
  using Scheduler::Scheduler;
  Sequence& add(std::unique_ptr<Sequence> sequence) {
    Scheduler::add(*sequence);
    return *(sequences_[sequence->request_id] = std::move(sequence));
  }
  /// Null where the sequence was given back, or never was.
  Sequence* find(int64_t id) {
    const auto at = sequences_.find(id);
    return at == sequences_.end() ? nullptr : at->second.get();
  }
  bool finish(int64_t id, FinishReason reason, std::string detail = {}) {
    Sequence* sequence = find(id);
    return sequence && Scheduler::finish(*sequence, reason, std::move(detail));
  }
  using Scheduler::schedule;
  Plan schedule() {
    Plan plan;
    schedule(plan);
    return plan;
  }
  bool has_unfinished() const { return stats().waiting + stats().running > 0; }
  std::vector<std::unique_ptr<Sequence>> take_finished() {
    std::vector<std::unique_ptr<Sequence>> taken;
    for (const Sequence* sequence : Scheduler::take_finished())
      taken.push_back(std::move(sequences_.extract(sequence->request_id).mapped()));
    return taken;
  }

 private:
  std::map<int64_t, std::unique_ptr<Sequence>> sequences_;
};

inline Sequence& add(OwningScheduler& scheduler, int64_t id, Tokens prompt,
                     int64_t max_tokens = 8) {
  return scheduler.add(make_sequence(id, std::move(prompt), max_tokens));
}

/// Processes a plan, every sampling sequence getting `token`.
inline void process(Scheduler& scheduler, Plan plan, int32_t token = 1) {
  const auto samples = std::ranges::count(plan.sequences, true, &ScheduledSequence::samples);
  scheduler.process(plan, Tokens(static_cast<size_t>(samples), token));
  Integrity::verify(scheduler);
}

inline Plan step(OwningScheduler& scheduler, int32_t token = 1) {
  Plan plan = scheduler.schedule();
  Integrity::verify(scheduler);
  if (!plan.empty()) process(scheduler, plan, token);
  return plan;
}

/// Steps until nothing is left to do.
inline void run_to_end(OwningScheduler& scheduler) {
  for (int steps = 0; scheduler.has_unfinished(); ++steps) {
    ASSERT_LT(steps, 1000);
    step(scheduler);
  }
}

/// (request id, first position, number of tokens) of all entries.
using Shares = std::vector<std::tuple<int64_t, int64_t, int64_t>>;
inline Shares shares(const Plan& plan) {
  Shares shares;
  for (const auto& entry : plan.sequences) {
    shares.emplace_back(entry.sequence->request_id, entry.start, entry.num_tokens);
  }
  return shares;
}

/// Runs everything to its end with the FakeRunner, `depth` steps in flight, and expects the tokens
/// of the plain histories.
inline void expect_plain_outputs(OwningScheduler& scheduler, FakeRunner& runner, int64_t depth,
                                 std::map<int64_t, Tokens> expected) {
  std::deque<Plan> plans;
  for (int steps = 0; scheduler.has_unfinished() || !plans.empty(); ++steps) {
    ASSERT_LT(steps, 10000);
    Plan plan = scheduler.schedule();
    Integrity::verify(scheduler);
    const bool planned = !plan.empty();
    if (planned) {
      runner.launch(plan);
      plans.push_back(std::move(plan));
    }
    if (!plans.empty() && (!planned || std::ssize(plans) == depth)) {
      scheduler.process(plans.front(), runner.run());
      plans.pop_front();
    }
    for (const auto& s : scheduler.take_finished()) {
      Tokens output(s->token_ids.begin() + s->num_prompt_tokens, s->token_ids.end());
      EXPECT_EQ(output, expected.at(s->request_id)) << "request " << s->request_id;
      EXPECT_EQ(s->error, "");
      expected.erase(s->request_id);
    }
  }
  EXPECT_TRUE(expected.empty()) << expected.size() << " requests never ended";
  EXPECT_EQ(scheduler.blocks().num_idle(), scheduler.blocks().num_blocks());
}

}  // namespace nanovllm
