// nanovllm bench: the shared half of the benchmarks.
#include "bench/bench.h"

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include <fmt/format.h>

#include "bench/roofline/machine.h"
#include "cli/load_model.h"
#include "comm/process_group.h"
#include "core/check.h"
#include "io/quantised/quantize.h"
#include "models/model.h"
#include "ops/cpu/num_threads.h"
#include "ops/gpu_rates.h"

namespace nanovllm::cli {

void add_bench_options(CLI::App& command, BenchOptions& o) {
  add_value(command, "--json", "FILE", "write JSON to FILE; - is standard output",
            [&o](const std::string& s) { o.json = s; });
  const auto positive = [](const std::string& s) {
    const double value = parse_number(s);
    check(std::isfinite(value) && value > 0, ErrorKind::invalid_argument,
          "must be a number above 0, got {}", s);
    return value;
  };
  add_value(command, "--bandwidth", "GB/s", "read bandwidth for the floor, instead of measuring",
            [&o, positive](const std::string& s) { o.bandwidth = positive(s); });
  add_value(command, "--tflops", "TFLOP/s", "matrix-product rate for the floor, likewise",
            [&o, positive](const std::string& s) { o.tflops = positive(s); });
  add_value(command, "--repetitions,-r", "N", "runs of each row; the median counts",
            [&o](const std::string& s) { o.repetitions = parse_integer(s, 1, 10000); });
}

CLI::App& add_benchmark(CLI::App& bench, const std::string& name, const std::string& help,
                        BenchOptions& o) {
  CLI::App& command = add_command(bench, name, help);
  add_model(command, o.model);
  add_bench_options(command, o);
  add_flag(command, "--peers", o.peers, "also print what other engines reach at the same");
  add_flag(command, "--quiet,-q", o.quiet, "no progress on standard error");
  add_engine_options(command, o.engine);
  return command;
}

Machine find_machine(const BenchOptions& options, const EngineInfo& info) {
  Machine machine;
  if (options.bandwidth > 0 && options.tflops > 0) {
    machine.source = "given by --bandwidth and --tflops";
  } else if (info.device.starts_with("cpu")) {
    const int threads =
        options.engine.num_threads > 0 ? options.engine.num_threads : cpu::default_num_threads();
    machine.rates = {measure_read_bandwidth(threads), measure_gemm_rate(threads, info.dtype)};
    machine.source = fmt::format("measured in this run with {} threads", threads);
  } else {
    if (const auto rates = measure_gpu_rates(info.device)) {
      machine.rates = {rates->bytes_per_second, rates->flops};
      machine.source = "measured in this run";
    } else {
      machine.rates = known_gpu_rates(info.device);
      machine.source = machine.rates.flops > 0
                           ? "measured earlier on such a GPU"
                           : "not known for this GPU: give --bandwidth and --tflops";
    }
  }
  if (options.bandwidth > 0) machine.rates.bytes_per_second = options.bandwidth * 1e9;
  if (options.tflops > 0) machine.rates.flops = options.tflops * 1e12;
  // Tensor cores multiply numbers of 8 bits twice as fast as bf16; a CPU E4M3 no faster, and int8
  // at up to twice this rate.
  machine.rates.quantised_flops = machine.rates.flops * (info.device.starts_with("cpu") ? 1 : 2);
  return machine;
}

BenchSetup::BenchSetup(const BenchOptions& options, int64_t max_len, int64_t batch)
    : options_(options) {
  require_model(options.model);
  EngineConfig& engine = options_.engine;
  engine.skip_tokenizer_init = true;
  if (engine.max_model_len == 0) engine.max_model_len = max_len;
  engine.max_num_seqs = std::max(engine.max_num_seqs, batch);
  const EngineInfo plan = nanovllm::inspect(options.model, engine);
  config_ = load_model_config(options.model, config_defaults);
  choose_quantization(config_, engine.quantization, engine.dequantize);
  machine_ = find_machine(options_, plan);
  const DType dtype = dtype_named(plan.dtype);
  if (machine_.rates.bytes_per_second > 0 && machine_.rates.flops > 0)
    roofline_ = std::make_unique<Roofline>(config_, count_reads(config_, dtype),
                                           dtype_named(plan.kv_cache_dtype), machine_.rates,
                                           engine.tensor_parallel_size);
}

BenchModel::BenchModel(const BenchOptions& bench_options, int64_t max_len, int64_t batch)
    : BenchSetup(bench_options, max_len, batch) {
  reset_peak_memory();
  Progress progress(options().quiet);
  EngineConfig engine = options().engine;
  show_loading(engine, progress);
  // Ranks of other processes could not be asked for their collectives again.
  if (engine.tensor_parallel_size > 1 && process_place().count == 1)
    communication_ = std::make_unique<CommunicationMeter>(recorders_);
  loaded_ = load_engine(options().model, engine,
                        communication_ ? recorders_.decorator() : BackendDecorator());
  progress.clear();
}

std::vector<std::vector<int32_t>> BenchSetup::fresh_prompts(int64_t count, int64_t length) {
  std::vector<std::vector<int32_t>> prompts(static_cast<size_t>(count));
  for (auto& ids : prompts) {
    ids.resize(static_cast<size_t>(length));
    for (int32_t& id : ids)
      id = static_cast<int32_t>(
          random_.randint(0, std::min<int64_t>(10000, config_.vocab_size - 1)));
  }
  return prompts;
}

SamplingParams BenchSetup::sampling_params(int64_t max_tokens) const {
  SamplingParams params;
  params.temperature = options_.temperature;
  params.max_tokens = max_tokens;
  params.ignore_eos = true;
  params.detokenize = false;
  params.output_kind = OutputKind::delta;
  return params;
}

BatchTrace run_batch(LLMEngine& engine, const std::vector<std::vector<int32_t>>& prompts,
                     const SamplingParams& params) {
  BatchTrace trace;
  const EngineStats before = engine.stats();
  const auto start = std::chrono::steady_clock::now();
  for (const auto& ids : prompts) engine.add_request(ids, params);
  std::unordered_set<int64_t> started;
  auto last = start;
  while (!engine.is_finished()) {
    const bool all_decode = started.size() == prompts.size();
    size_t tokens = 0;
    for (const RequestOutput& output : engine.step()) {
      check(output.outputs[0].finish_reason != FinishReason::error, ErrorKind::invalid_argument,
            "{}", output.error);
      tokens += output.outputs[0].token_ids.size();
      if (!output.outputs[0].token_ids.empty()) started.insert(output.request_id);
    }
    const auto now = std::chrono::steady_clock::now();
    if (all_decode && tokens == prompts.size()) trace.steps.push_back(to_seconds(now - last));
    if (tokens > 0) last = now;
    if (!all_decode) trace.first_tokens = to_seconds(now - start);
  }
  trace.host_seconds = host_seconds_per_step(before, engine.stats());
  return trace;
}

double host_seconds_per_step(const EngineStats& before, const EngineStats& after) {
  return (after.schedule_seconds + after.build_seconds - before.schedule_seconds -
          before.build_seconds) /
         std::max<double>(1, double(after.steps - before.steps));
}

double quantile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const auto rank = static_cast<size_t>(std::ceil(share * double(values.size())));
  return values[std::clamp<size_t>(rank, 1, values.size()) - 1];
}

double median(std::vector<double> values) {
  return (quantile(values, 0.5) + quantile(values, 0.5 + 0.5 / double(values.size() + 1))) / 2;
}

void add_bench(CLI::App& program, Action& action) {
  CLI::App& bench =
      add_command(program, "bench", "Measure an engine against what its machine allows at best");
  add_bench_throughput(bench, action);
  add_bench_latency(bench, action);
  add_bench_prefill(bench, action);
  add_bench_startup(bench, action);
  add_bench_step(bench, action);
  add_bench_attention(bench, action);
  add_bench_gemm(bench, action);
  add_bench_quality(bench, action);
}

}  // namespace nanovllm::cli
