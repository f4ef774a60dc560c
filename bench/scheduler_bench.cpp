// The cost of the scheduler per step: schedule() and process() for running decodes, at one and at
// two steps in flight. Not a test: prints medians over many steps.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "engine/scheduler/scheduler.h"

namespace {

using nanovllm::Plan;
using nanovllm::Scheduler;
using nanovllm::SchedulerConfig;
using nanovllm::Sequence;
using Clock = std::chrono::steady_clock;

double microseconds(Clock::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

struct Median {
  std::vector<double> values;
  double get(double quantile = 0.5) {
    std::ranges::sort(values);
    return values[static_cast<size_t>(quantile * static_cast<double>(values.size() - 1))];
  }
};

void measure(int num_seqs, int depth, int block_size) {
  constexpr int kPrompt = 512, kSteps = 1000;
  SchedulerConfig config;
  config.max_num_seqs = num_seqs;
  config.block_size = block_size;
  config.num_blocks = int64_t{num_seqs} * (2 * kSteps / block_size + 2);
  config.max_plans_in_flight = depth;
  Scheduler scheduler(config);
  std::vector<Sequence> sequences(static_cast<size_t>(num_seqs));
  for (int id = 0; id < num_seqs; ++id) {
    Sequence& sequence = sequences[static_cast<size_t>(id)];
    sequence.request_id = id;
    sequence.token_ids.assign(kPrompt, id);
    sequence.num_prompt_tokens = kPrompt;
    sequence.max_tokens = kSteps + 100;
    scheduler.add(sequence);
  }
  std::vector<Plan> plans(static_cast<size_t>(depth));
  std::vector<int32_t> sampled;
  Median schedule, process, both;
  int64_t step = 0;
  const auto plan_next = [&] {
    const auto begin = Clock::now();
    scheduler.schedule(plans[static_cast<size_t>(step++ % depth)]);
    return microseconds(Clock::now() - begin);
  };
  for (int i = 1; i < depth; ++i) plan_next();
  for (int i = 0; i < kSteps; ++i) {
    const double schedule_us = plan_next();
    Plan& oldest = plans[static_cast<size_t>(step % depth)];
    const auto samples =
        std::ranges::count(oldest.sequences, true, &nanovllm::ScheduledSequence::samples);
    sampled.assign(static_cast<size_t>(samples), i);
    const auto begin = Clock::now();
    scheduler.process(oldest, sampled);
    const double process_us = microseconds(Clock::now() - begin);
    if (oldest.num_prefill_tokens > 0) continue;
    schedule.values.push_back(schedule_us);
    process.values.push_back(process_us);
    both.values.push_back(schedule_us + process_us);
  }
  std::printf("%6d %6d %6d %10.1f %10.1f %10.1f %10.1f\n", num_seqs, depth, block_size,
              schedule.get(), process.get(), both.get(), both.get(0.99));
}

}  // namespace

int main() {
  std::printf("%6s %6s %6s %10s %10s %10s %10s   (us, medians over decode steps)\n", "seqs",
              "depth", "block", "schedule", "process", "both", "p99");
  for (const int num_seqs : {1, 64, 256, 1024}) {
    for (const int depth : {1, 2}) measure(num_seqs, depth, 64);
  }
  measure(256, 1, 16);
  measure(256, 2, 256);
}
