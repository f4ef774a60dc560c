// nanovllm bench throughput: nano-vLLM's offline workload, or one of other lengths.
#include <algorithm>
#include <memory>

#include "bench/bench.h"
#include "bench/roofline/machine.h"
#include "cli/exit_code.h"
#include "core/check.h"

namespace nanovllm::cli {
namespace {

struct ThroughputOptions : BenchOptions {
  ThroughputOptions() {
    temperature = 0.6;
    repetitions = 2;
  }
  int64_t num_prompts = 256;
  LengthRange input{100, 1024}, output{100, 1024};
  uint64_t workload_seed = 0;
};

// "1024" or "100-1024".
LengthRange parse_range(const std::string& text) {
  constexpr int64_t kLongest = 1 << 24;
  const size_t dash = text.find('-');
  if (dash == std::string::npos) {
    const int64_t length = parse_integer(text, 1, kLongest);
    return {length, length};
  }
  const LengthRange range{parse_integer(text.substr(0, dash), 1, kLongest),
                          parse_integer(text.substr(dash + 1), 1, kLongest)};
  check(range.min <= range.max, ErrorKind::invalid_argument, "must be N or MIN-MAX, got {}",
        quote(text));
  return range;
}

struct Pass {
  double seconds;
  int64_t prompt_tokens, cached_tokens, output_tokens, steps, preemptions;
  double host_seconds;
};

Pass run_pass(BenchModel& model, const Workload& workload, Progress& progress) {
  LLMEngine& engine = model.engine();
  if (model.communication()) model.communication()->begin();
  const EngineStats before = engine.stats();
  const auto start = std::chrono::steady_clock::now();
  for (size_t i = 0; i < workload.prompts.size(); ++i) {
    SamplingParams params = model.sampling_params(workload.max_tokens[i]);
    params.output_kind = OutputKind::final_only;
    engine.add_request(workload.prompts[i], params);
  }
  int64_t done = 0;
  while (!engine.is_finished()) {
    for (const RequestOutput& output : engine.step()) {
      check(output.outputs[0].finish_reason != FinishReason::error, ErrorKind::invalid_argument,
            "{}", output.error);
      ++done;
    }
    progress.update(engine.stats(), done, static_cast<int64_t>(workload.prompts.size()));
  }
  Pass pass{};
  pass.seconds = seconds_since(start);
  const EngineStats after = engine.stats();
  pass.prompt_tokens = after.prompt_tokens - before.prompt_tokens;
  pass.cached_tokens = after.cached_prompt_tokens - before.cached_prompt_tokens;
  pass.output_tokens = after.generated_tokens - before.generated_tokens;
  pass.steps = after.steps - before.steps;
  pass.preemptions = after.preemptions - before.preemptions;
  pass.host_seconds =
      after.schedule_seconds + after.build_seconds - before.schedule_seconds - before.build_seconds;
  return pass;
}

// Seconds at best. From the second pass on the prompts come from the prefix cache, all but the last
// token of each.
Json floor_of(const Roofline* roofline, const Workload& workload, bool cached) {
  if (!roofline) return nullptr;
  std::vector<int64_t> inputs;
  for (const auto& ids : workload.prompts) inputs.push_back(static_cast<int64_t>(ids.size()));
  const double whole = roofline->offline(inputs, workload.max_tokens);
  if (!cached) return whole;
  const std::vector<int64_t> ones(inputs.size(), 1);
  return whole - roofline->prefill(inputs) + roofline->prefill(ones);
}

int bench_throughput(const ThroughputOptions& options) {
  BenchModel model(options, options.input.max + options.output.max, 1);
  const int64_t max_id = std::min<int64_t>(10000, model.config().vocab_size - 1);
  const Workload workload = draw_workload(options.workload_seed, options.num_prompts, options.input,
                                          options.output, max_id);
  BenchReport report("throughput", options,
                     {{"test", "pass"},
                      {"prompt_tokens", "prompt tokens"},
                      {"cached_tokens", "cached"},
                      {"output_tokens", "output tokens"},
                      {"measured", "seconds", 2},
                      {"tokens_per_second", "output tok/s", 1},
                      {"floor", "floor, s", 2},
                      {"share", "of the floor"},
                      {"host_us_per_step", "host us/step", 1}});
  if (model.communication()) report.add_communication({"communication", "communication, s", 2});
  // One short request first: what happens once in a process does not count.
  run_batch(model.engine(), model.fresh_prompts(1, std::min<int64_t>(8, options.input.max)),
            model.sampling_params(std::min<int64_t>(2, options.output.max)));
  model.engine().reset_prefix_cache();
  Progress progress(options.quiet);
  for (int64_t i = 0; i < options.repetitions; ++i) {
    const Pass pass = run_pass(model, workload, progress);
    const bool cached = i > 0 && options.engine.enable_prefix_caching;
    Json row = {
        {"test", i == 0 ? "first" : "again"},
        {"num_prompts", options.num_prompts},
        {"prompt_tokens", workload.prompt_tokens()},
        {"cached_tokens", pass.cached_tokens},
        {"output_tokens", pass.output_tokens},
        {"measured", pass.seconds},
        {"tokens_per_second", double(pass.output_tokens) / pass.seconds},
        {"floor", floor_of(model.roofline(), workload, cached)},
        {"steps", pass.steps},
        {"preemptions", pass.preemptions},
        {"host_us_per_step", 1e6 * pass.host_seconds / double(std::max<int64_t>(1, pass.steps))}};
    if (model.communication()) {
      const auto reading = model.communication()->all_steps();
      row["communication"] = reading.seconds;
      row["collectives"] = reading.calls;
    }
    report.add(std::move(row));
  }
  progress.clear();
  report.write(model.info(), model.machine(), model.config(), peak_memory());
  return kExitDone;
}

}  // namespace

void add_bench_throughput(CLI::App& bench, Action& action) {
  auto options = std::make_shared<ThroughputOptions>();
  ThroughputOptions& o = *options;
  CLI::App& command =
      add_benchmark(bench, "throughput",
                    "An offline workload: nano-vLLM's, as Python's random.seed(0) draws it", o);
  add_value(command, "--num-prompts", "N", "prompts (256)",
            [&o](const std::string& s) { o.num_prompts = parse_integer(s, 1, 1 << 24); });
  add_value(command, "--input-len", "N|MIN-MAX", "prompt tokens, drawn uniformly (100-1024)",
            [&o](const std::string& s) { o.input = parse_range(s); });
  add_value(command, "--output-len", "N|MIN-MAX", "generated tokens, likewise (100-1024)",
            [&o](const std::string& s) { o.output = parse_range(s); });
  add_value(command, "--workload-seed", "N", "seed of the draw (0)", [&o](const std::string& s) {
    o.workload_seed = static_cast<uint64_t>(parse_integer(s, 0));
  });
  add_value(command, "--temperature", "T", "of sampling (0.6)",
            [&o](const std::string& s) { o.temperature = parse_number(s); });
  set_action(command, action, [options] { return bench_throughput(*options); });
}

}  // namespace nanovllm::cli
