// nanovllm bench latency: milliseconds per token of a batch that decodes.
#include <algorithm>
#include <memory>

#include <fmt/format.h>

#include "bench/bench.h"
#include "bench/roofline/machine.h"
#include "cli/exit_code.h"

namespace nanovllm::cli {
namespace {

struct LatencyOptions : BenchOptions {
  std::vector<int64_t> batch_sizes{1}, input_lens{128};
  int64_t output_len = 128;
};

Json measure(BenchModel& model, int64_t batch, int64_t input_len, int64_t output_len) {
  const SamplingParams params = model.sampling_params(output_len);
  std::vector<double> steps, first_tokens, host;
  for (int64_t i = 0; i < model.options().repetitions; ++i) {
    const BatchTrace trace =
        run_batch(model.engine(), model.fresh_prompts(batch, input_len), params);
    steps.insert(steps.end(), trace.steps.begin(), trace.steps.end());
    first_tokens.push_back(trace.first_tokens);
    host.push_back(trace.host_seconds);
  }
  const double ms = 1e3 * median(steps);
  Json floor;
  if (const Roofline* roofline = model.roofline()) {
    // The mean context of the steps measured: the k-th token of the output is decoded from
    // input_len + k - 1 others.
    const double context = double(batch) * (double(input_len) + double(output_len) / 2);
    floor = 1e3 * roofline->decode_step(batch, static_cast<int64_t>(context));
  }
  Json row = {{"test", fmt::format("tg{}", output_len)},
              {"batch_size", batch},
              {"input_len", input_len},
              {"output_len", output_len},
              {"measured", ms},
              {"p99", 1e3 * quantile(steps, 0.99)},
              {"tokens_per_second", ms > 0 ? 1e3 * double(batch) / ms : 0.0},
              {"time_to_first_token_ms", 1e3 * median(first_tokens)},
              {"floor", floor},
              {"host_us_per_step", 1e6 * median(host)}};
  if (model.communication()) {
    const auto reading = model.communication()->last_step(model.options().repetitions);
    row["communication_ms"] = 1e3 * reading.seconds;
    row["collectives"] = reading.calls;
  }
  return row;
}

int bench_latency(const LatencyOptions& options) {
  const int64_t batch = *std::max_element(options.batch_sizes.begin(), options.batch_sizes.end());
  const int64_t input = *std::max_element(options.input_lens.begin(), options.input_lens.end());
  BenchModel model(options, input + options.output_len, batch);
  BenchReport report("latency", options,
                     {{"test", "test"},
                      {"batch_size", "batch"},
                      {"input_len", "prompt"},
                      {"measured", "ms/token, median", 3},
                      {"p99", "p99", 3},
                      {"tokens_per_second", "tok/s", 1},
                      {"time_to_first_token_ms", "first token, ms", 2},
                      {"floor", "floor, ms", 3},
                      {"share", "of the floor"},
                      {"host_us_per_step", "host us/step", 1}});
  if (model.communication()) report.add_communication({"communication_ms", "communication, ms", 3});
  run_batch(model.engine(), model.fresh_prompts(1, std::min<int64_t>(8, input)),
            model.sampling_params(std::min<int64_t>(4, options.output_len)));
  for (int64_t input_len : options.input_lens)
    for (int64_t batch_size : options.batch_sizes)
      report.add(measure(model, batch_size, input_len, options.output_len));
  report.write(model.info(), model.machine(), model.config(), peak_memory());
  return kExitDone;
}

}  // namespace

void add_bench_latency(CLI::App& bench, Action& action) {
  auto options = std::make_shared<LatencyOptions>();
  LatencyOptions& o = *options;
  CLI::App& command = add_benchmark(bench, "latency", "Time per token of a decoding batch", o);
  add_value(command, "--batch-size", "N,...", "sequences at once (1)",
            [&o](const std::string& s) { o.batch_sizes = parse_integers(s, 1, 65536); });
  add_value(command, "--input-len", "N,...", "prompt tokens (128)",
            [&o](const std::string& s) { o.input_lens = parse_integers(s, 1, 1 << 24); });
  add_value(command, "--output-len", "N", "generated tokens (128)",
            [&o](const std::string& s) { o.output_len = parse_integer(s, 2, 1 << 24); });
  add_value(command, "--temperature", "T", "of sampling (0)",
            [&o](const std::string& s) { o.temperature = parse_number(s); });
  set_action(command, action, [options] { return bench_latency(*options); });
}

}  // namespace nanovllm::cli
