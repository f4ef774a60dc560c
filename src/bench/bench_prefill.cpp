// nanovllm bench prefill: prompt tokens per second.
#include <algorithm>
#include <memory>

#include <fmt/format.h>

#include "bench/bench.h"
#include "bench/roofline/machine.h"
#include "cli/exit_code.h"

namespace nanovllm::cli {
namespace {

struct PrefillOptions : BenchOptions {
  std::vector<int64_t> batch_sizes{1}, input_lens{512};
};

Json measure(BenchModel& model, int64_t batch, int64_t input_len) {
  if (model.communication()) model.communication()->begin();
  std::vector<double> seconds;
  for (int64_t i = 0; i < model.options().repetitions; ++i)
    seconds.push_back(
        run_batch(model.engine(), model.fresh_prompts(batch, input_len), model.sampling_params(1))
            .first_tokens);
  const double typical = median(seconds);
  Json floor;
  if (const Roofline* roofline = model.roofline())
    floor = 1e3 * roofline->prefill(std::vector<int64_t>(static_cast<size_t>(batch), input_len));
  Json row = {{"test", fmt::format("pp{}", input_len)},
              {"batch_size", batch},
              {"input_len", input_len},
              {"measured", 1e3 * typical},
              {"best", 1e3 * quantile(seconds, 0)},
              {"tokens_per_second", double(batch * input_len) / typical},
              {"floor", floor}};
  if (model.communication()) {
    const auto reading = model.communication()->all_steps();
    row["communication_ms"] = 1e3 * reading.seconds / double(seconds.size());
    row["collectives"] = reading.calls / std::ssize(seconds);
  }
  return row;
}

int bench_prefill(const PrefillOptions& options) {
  const int64_t batch = *std::max_element(options.batch_sizes.begin(), options.batch_sizes.end());
  const int64_t input = *std::max_element(options.input_lens.begin(), options.input_lens.end());
  BenchModel model(options, input + 1, batch);
  BenchReport report("prefill", options,
                     {{"test", "test"},
                      {"batch_size", "batch"},
                      {"measured", "ms, median", 2},
                      {"best", "best", 2},
                      {"tokens_per_second", "tok/s", 1},
                      {"floor", "floor, ms", 2},
                      {"share", "of the floor"}});
  if (model.communication()) report.add_communication({"communication_ms", "communication, ms", 2});
  // A first run of each shape is not measured: libraries prepare their kernels in it.
  for (int64_t input_len : options.input_lens)
    for (int64_t batch_size : options.batch_sizes) {
      run_batch(model.engine(), model.fresh_prompts(batch_size, input_len),
                model.sampling_params(1));
      report.add(measure(model, batch_size, input_len));
    }
  report.write(model.info(), model.machine(), model.config(), peak_memory());
  return kExitDone;
}

}  // namespace

void add_bench_prefill(CLI::App& bench, Action& action) {
  auto options = std::make_shared<PrefillOptions>();
  PrefillOptions& o = *options;
  CLI::App& command = add_benchmark(bench, "prefill", "Prompt tokens per second", o);
  add_value(command, "--batch-size", "N,...", "prompts at once (1)",
            [&o](const std::string& s) { o.batch_sizes = parse_integers(s, 1, 65536); });
  add_value(command, "--input-len", "N,...", "tokens of each prompt (512)",
            [&o](const std::string& s) { o.input_lens = parse_integers(s, 1, 1 << 24); });
  set_action(command, action, [options] { return bench_prefill(*options); });
}

}  // namespace nanovllm::cli
