// nanovllm bench step: where the time of a decode step goes, or of one that computes prompts.
//
// The engine works as always, over a backend that remembers the operations of a step. Then each
// kind of operation is run alone, all of a step's calls of it on their own weights and cache, and
// so are all of them together. What the whole step takes beyond that is time in which the device
// waits.
#include <algorithm>
#include <memory>
#include <unordered_set>

#include "bench/bench.h"
#include "bench/roofline/machine.h"
#include "bench/timing.h"
#include "cli/exit_code.h"
#include "core/check.h"

namespace nanovllm::cli {
namespace {

struct StepOptions : BenchOptions {
  std::vector<int64_t> batch_sizes{1}, input_lens{1024};
  int64_t steps = 32;
  bool prefill = false;
};

// The first decode steps of a shape run eagerly and record the graph.
constexpr int64_t kFirstSteps = 4;

/// Tokens that no sequence reaches: the first ones decode while the last ones' prompts are
/// computed.
int64_t tokens_needed(int64_t batch, int64_t input_len, int64_t steps) {
  constexpr int64_t kFewestTokensOfAStep = 512;
  return steps + 2 * kFirstSteps + 2 * batch * input_len / kFewestTokensOfAStep;
}

/// A batch that decodes, and is not done.
class Decoding {
 public:
  Decoding(LLMEngine& engine, BenchSetup& setup, int64_t batch, int64_t input_len, int64_t steps)
      : engine_(engine), batch_(batch), input_len_(input_len) {
    const SamplingParams params = setup.sampling_params(tokens_needed(batch, input_len, steps));
    for (auto& ids : setup.fresh_prompts(batch, input_len))
      requests_.push_back(engine.add_request(std::move(ids), params));
    while (std::ssize(started_) < batch) step();  // prompts may come in several steps
    for (int64_t i = 0; i < kFirstSteps; ++i) step();
    const EngineStats before = engine.stats();
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < steps; ++i) step();
    seconds_ = seconds_since(begin) / double(steps);
    host_ = host_seconds_per_step(before, engine.stats());
  }
  ~Decoding() {
    for (const int64_t id : requests_) engine_.abort_request(id);
  }

  /// A mean step: with steps in flight, single calls of step() are uneven.
  double seconds() const { return seconds_; }
  double host_seconds() const { return host_; }
  /// Keys that the last step's attention read, of all sequences together.
  int64_t context() const { return batch_ * input_len_ + tokens_; }

 private:
  void step() {
    for (const RequestOutput& output : engine_.step()) {
      check(output.outputs[0].finish_reason != FinishReason::error, ErrorKind::invalid_argument,
            "{}", output.error);
      tokens_ += std::ssize(output.outputs[0].token_ids);
      if (!output.outputs[0].token_ids.empty()) started_.insert(output.request_id);
    }
  }

  LLMEngine& engine_;
  int64_t batch_, input_len_, tokens_ = 0;
  std::vector<int64_t> requests_;
  std::unordered_set<int64_t> started_;  // that have a token
  double seconds_ = 0, host_ = 0;
};

/// Prompts that one step computes whole. Each request ends with its first token, so that no step
/// follows.
class Prefilling {
 public:
  Prefilling(LLMEngine& engine, BenchSetup& setup, int64_t batch, int64_t input_len,
             int64_t repetitions)
      : engine_(engine) {
    const EngineStats before = engine.stats();
    std::vector<double> seconds;
    for (int64_t i = 0; i <= repetitions; ++i) {  // the first one prepares kernels
      const double taken = run(setup.fresh_prompts(batch, input_len), setup.sampling_params(1));
      if (i > 0) seconds.push_back(taken);
    }
    seconds_ = median(seconds);
    host_ = host_seconds_per_step(before, engine.stats());
  }

  double seconds() const { return seconds_; }
  double host_seconds() const { return host_; }

 private:
  double run(std::vector<std::vector<int32_t>> prompts, const SamplingParams& params) {
    const EngineStats before = engine_.stats();
    const auto begin = std::chrono::steady_clock::now();
    for (auto& ids : prompts) engine_.add_request(std::move(ids), params);
    while (!engine_.is_finished())
      for (const RequestOutput& output : engine_.step())
        check(output.outputs[0].finish_reason != FinishReason::error, ErrorKind::invalid_argument,
              "{}", output.error);
    check(engine_.stats().steps == before.steps + 1, ErrorKind::invalid_argument,
          "the prompts do not fit one step: see --max-num-batched-tokens and --max-num-seqs");
    return seconds_since(begin);
  }

  LLMEngine& engine_;
  double seconds_ = 0, host_ = 0;
};

/// One kind of operation in a step.
struct Part {
  std::string name;
  std::vector<const RecordedOp*> ops;
};

/// `each`: every small kernel is a part of its own.
std::vector<Part> parts_of(const std::vector<RecordedOp>& step, bool each) {
  std::vector<Part> parts;
  for (const RecordedOp& op : step) {
    const std::string name = each ? op.name : op.part;
    auto part =
        std::find_if(parts.begin(), parts.end(), [&](const Part& p) { return p.name == name; });
    if (part == parts.end()) part = parts.insert(parts.end(), {name, {}});
    part->ops.push_back(&op);
  }
  // Sampling first: it reads the logits that the real step has left, before others write there.
  std::stable_partition(parts.begin(), parts.end(),
                        [](const Part& p) { return p.name == "sampling"; });
  return parts;
}

/// The same operations on all ranks; `records`: see seconds_of_ranks().
double time_part(std::span<Backend* const> devices, const std::vector<Part>& part_of_rank,
                 int64_t repetitions, bool records) {
  return seconds_of_ranks(devices, repetitions, records, [&](size_t rank) {
    for (const RecordedOp* op : part_of_rank[rank].ops) op->run();
  });
}

/// Seconds at best, and the bytes and FLOPs behind them; zeros for what only touches activations.
struct Floor {
  double seconds = 0, bytes = 0, flops = 0;
};

/// The work of a step's attention, all layers together.
struct AttentionWork {
  double bytes = 0;  // of keys and values that it reads
  double flops = 0;
};

Floor floor_of(const Part& part, const BenchSetup& setup, const AttentionWork& attention) {
  Floor floor;
  const Rates& rates = setup.machine().rates;
  const auto add = [&](double bytes, double flops, double flops_per_second) {
    floor.bytes += bytes;
    floor.flops += flops;
    if (setup.roofline())
      floor.seconds += std::max(bytes / rates.bytes_per_second, flops / flops_per_second);
  };
  for (const RecordedOp* op : part.ops)
    add(op->weight_bytes + op->bytes, 2 * double(op->rows) * double(op->n) * double(op->k),
        op->quantises_rows ? rates.quantised_flops : rates.flops);
  // One operation alone prepares the step: its attention is then within "all layers".
  if (part.name == "all layers" || (part.name == "attention" && part.ops.size() > 1))
    add(attention.bytes, attention.flops, rates.flops);
  return floor;
}

/// The step that the recorder remembers, as the clock saw it.
struct WholeStep {
  double seconds = 0, host_seconds = 0, floor = 0;  // floor: 0 where the rates are not known
  AttentionWork attention;
};

class StepBench {
 public:
  explicit StepBench(const StepOptions& options)
      : options_(options),
        setup_(
            options,
            longest(options.input_lens) + tokens_needed(longest(options.batch_sizes),
                                                        longest(options.input_lens), options.steps),
            longest(options.batch_sizes)) {
    reset_peak_memory();
    loaded_ = load_engine(setup_.options().model, setup_.options().engine, recorders_.decorator());
    devices_ = recorders_.devices();
  }

  int run() {
    BenchReport report("step", options_,
                       {{"batch_size", "batch"},
                        {"input_len", "prompt"},
                        {"part", "part of the step"},
                        {"calls", "calls"},
                        {"measured", "us", 1},
                        {"of_step", "% of the step", 1},
                        {"gb_per_second", "GB/s", 0},
                        {"tflops", "TFLOP/s", 0},
                        {"floor", "floor, us", 1},
                        {"share", "of the floor"}});
    for (const int64_t input_len : options_.input_lens)
      for (const int64_t batch : options_.batch_sizes) add_rows(report, batch, input_len);
    report.note(
        "Each part alone, all its calls of one step on their own weights and cache; \"device\" is "
        "all of them in order. Of several ranks, all at once; sizes and rates are one rank's.");
    report.note(
        "\"step\" is the engine's, by the clock; \"idle\" is what it takes beyond \"device\".");
    report.write(loaded_.info, setup_.machine(), setup_.config(), peak_memory());
    return kExitDone;
  }

 private:
  static int64_t longest(const std::vector<int64_t>& values) {
    return *std::max_element(values.begin(), values.end());
  }

  WholeStep run_step(int64_t batch, int64_t input_len) {
    const ModelConfig& c = setup_.config();
    const double tokens = double(batch * input_len), length = double(input_len);
    const auto ranks = double(devices_.size());
    WholeStep step;
    if (options_.prefill) {
      const Prefilling run(*loaded_.engine, setup_, batch, input_len, options_.repetitions);
      step.seconds = run.seconds();
      step.host_seconds = run.host_seconds();
      step.attention.flops = 2 * tokens * (length + 1) * double(c.num_hidden_layers) *
                             double(c.num_attention_heads * c.head_dim) / ranks;
      if (const Roofline* roofline = setup_.roofline())
        step.floor = roofline->prefill(std::vector(static_cast<size_t>(batch), input_len));
    } else {
      const Decoding run(*loaded_.engine, setup_, batch, input_len, options_.steps);
      step.seconds = run.seconds();
      step.host_seconds = run.host_seconds();
      if (const Roofline* roofline = setup_.roofline()) {
        step.attention.bytes = roofline->kv_bytes_per_token() * double(run.context()) / ranks;
        step.floor = roofline->decode_step(batch, run.context());
      }
    }
    return step;
  }

  void add_rows(BenchReport& report, int64_t batch, int64_t input_len) {
    const WholeStep whole = run_step(batch, input_len);
    std::vector<std::vector<Part>> parts;  // of each rank
    std::vector<Part> all;
    for (const StepRecorder* recorder : recorders_.all()) {
      parts.push_back(parts_of(recorder->last_step(), options_.prefill));
      all.push_back({"device", {}});
      for (const RecordedOp& op : recorder->last_step()) all.back().ops.push_back(&op);
    }
    // Sums beside products, of many rows, wait for events across devices.
    const bool records = devices_.size() == 1 || !options_.prefill;
    const auto add = [&](const std::string& part, double seconds, Json more) {
      more.update({{"batch_size", batch},
                   {"input_len", input_len},
                   {"part", part},
                   {"measured", 1e6 * seconds},
                   {"of_step", 100 * seconds / whole.seconds}});
      report.add(std::move(more));
    };
    double sum = 0;
    for (size_t i = 0; i < parts[0].size(); ++i) {
      const Part& part = parts[0][i];
      std::vector<Part> of_rank;
      for (const std::vector<Part>& rank : parts) of_rank.push_back(rank[i]);
      const double seconds = time_part(devices_, of_rank, options_.repetitions, records);
      const Floor floor = floor_of(part, setup_, whole.attention);
      sum += seconds;
      Json more = {{"calls", part.ops.size()}, {"flops", floor.flops}};
      if (floor.bytes > 0) more["gb_per_second"] = floor.bytes / seconds / 1e9;
      if (floor.flops > 0) more["tflops"] = floor.flops / seconds / 1e12;
      if (floor.seconds > 0) more["floor"] = 1e6 * floor.seconds;
      add(part.name, seconds, more);
    }
    const double device = time_part(devices_, all, options_.repetitions, records);
    const Json floor = whole.floor > 0 ? Json(1e6 * whole.floor) : Json();
    const size_t calls = all[0].ops.size();
    add("sum of the parts", sum, {{"calls", calls}});
    add("device", device, {{"calls", calls}, {"floor", floor}});
    add("idle", std::max(0.0, whole.seconds - device), Json::object());
    add("step", whole.seconds, {{"floor", floor}});
    add("host work, hidden or not", whole.host_seconds, Json::object());
  }

  const StepOptions& options_;
  BenchSetup setup_;
  StepRecorders recorders_;
  std::vector<Backend*> devices_;  // the ranks'
  LoadedEngine loaded_;
};

int bench_step(const StepOptions& options) { return StepBench(options).run(); }

}  // namespace

void add_bench_step(CLI::App& bench, Action& action) {
  auto options = std::make_shared<StepOptions>();
  StepOptions& o = *options;
  CLI::App& command = add_benchmark(bench, "step", "Where the time of a step goes", o);
  add_flag(command, "--prefill", o.prefill,
           "the step that computes the prompts, instead of one that decodes");
  add_value(command, "--batch-size", "N,...", "sequences at once (1)",
            [&o](const std::string& s) { o.batch_sizes = parse_integers(s, 1, 65536); });
  add_value(command, "--input-len", "N,...", "prompt tokens (1024)",
            [&o](const std::string& s) { o.input_lens = parse_integers(s, 1, 1 << 24); });
  add_value(command, "--steps", "N", "steps measured as a whole (32)",
            [&o](const std::string& s) { o.steps = parse_integer(s, 1, 1 << 20); });
  add_value(command, "--temperature", "T", "of sampling (0)",
            [&o](const std::string& s) { o.temperature = parse_number(s); });
  set_action(command, action, [options] { return bench_step(*options); });
}

}  // namespace nanovllm::cli
