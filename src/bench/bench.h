// The parts that all benchmarks share: options, a model on a machine of known rates, and a report
// that puts every figure beside its physical floor.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "bench/communication.h"
#include "bench/roofline/roofline.h"
#include "bench/workload.h"
#include "cli/command.h"
#include "cli/options.h"
#include "cli/terminal/output.h"
#include "cli/terminal/progress.h"
#include "core/seconds.h"
#include "io/json.h"

namespace nanovllm::cli {

/// The options that all benchmarks have.
struct BenchOptions {
  std::string model;
  EngineConfig engine;
  std::string json;      ///< file for the report as JSON, "-" for standard output
  double bandwidth = 0;  ///< GB/s; 0: measured, or what is known of the GPU
  double tflops = 0;     ///< TFLOP/s; 0: the same
  double temperature = 0;
  int64_t repetitions = 5;
  bool peers = false, quiet = false;
};

/// The options of all benchmarks: --json, --bandwidth, --tflops, --repetitions.
void add_bench_options(CLI::App& command, BenchOptions& options);

/// The subcommand `name` of `bench` with the shared options, for a benchmark to add its own.
/// `options` lives as long as the command.
CLI::App& add_benchmark(CLI::App& bench, const std::string& name, const std::string& help,
                        BenchOptions& options);

/// The rates of the machine that `info` says the engine is on.
struct Machine {
  Rates rates;         ///< zeros where they are not known
  std::string source;  ///< "measured in this run", "--bandwidth and --tflops", ...
};
/// By measurement, by the options, or by the GPU's name where it has no room for a measurement.
Machine find_machine(const BenchOptions& options, const EngineInfo& info);

/// The object of a measurement: a model and options, and the machine's rates, taken before it
/// loads.
class BenchSetup {
 public:
  /// Makes room for sequences of `max_len` tokens, `batch` at once, unless the options say how
  /// much.
  BenchSetup(const BenchOptions& options, int64_t max_len, int64_t batch);

  const BenchOptions& options() const { return options_; }
  const ModelConfig& config() const { return config_; }
  const Machine& machine() const { return machine_; }
  /// Null where the machine's rates are not known.
  const Roofline* roofline() const { return roofline_.get(); }

  /// `count` prompts of `length` random ids that no earlier prompt began with.
  std::vector<std::vector<int32_t>> fresh_prompts(int64_t count, int64_t length);
  SamplingParams sampling_params(int64_t max_tokens) const;

 private:
  BenchOptions options_;
  ModelConfig config_;
  Machine machine_;
  std::unique_ptr<Roofline> roofline_;
  PythonRandom random_{0};
};

/// The same, loaded: token ids in and out.
class BenchModel : public BenchSetup {
 public:
  BenchModel(const BenchOptions& options, int64_t max_len, int64_t batch);
  LLMEngine& engine() { return *loaded_.engine; }
  const EngineInfo& info() const { return loaded_.info; }
  /// Null where there is one rank, or where ranks are processes.
  CommunicationMeter* communication() { return communication_.get(); }

 private:
  StepRecorders recorders_;
  std::unique_ptr<CommunicationMeter> communication_;
  LoadedEngine loaded_;
};

/// How the engine went through one batch.
struct BatchTrace {
  double first_tokens = 0;    ///< seconds until every request had its first token
  std::vector<double> steps;  ///< seconds of each decode step of the whole batch
  double host_seconds = 0;    ///< scheduling and batch building, a mean step
};
/// Throws Error(invalid_argument) if a request is refused.
BatchTrace run_batch(LLMEngine& engine, const std::vector<std::vector<int32_t>>& prompts,
                     const SamplingParams& params);

/// Scheduling and batch building of a mean step between two readings.
double host_seconds_per_step(const EngineStats& before, const EngineStats& after);

/// The middle of the values, and the one that `share` of them do not exceed; 0 for none.
double median(std::vector<double> values);
double quantile(std::vector<double> values, double share);

class BenchReport {
 public:
  struct Column {
    std::string key;  ///< in a row
    std::string title;
    int digits = 0;  ///< after the point
  };
  /// Opens the file of options.json: a wrong name should not cost a measurement. Throws
  /// Error(invalid_argument).
  BenchReport(std::string benchmark, const BenchOptions& options, std::vector<Column> columns);

  /// A last column, of a CommunicationMeter's figures, and what is to be said about them.
  void add_communication(Column column) {
    columns_.push_back(std::move(column));
    note(kCommunicationNote);
  }
  /// A row of the table; JSON has all its fields, the table those that are columns. A row with
  /// `measured` and `floor` in it (both seconds, or both milliseconds) also gets its "share".
  void add(Json row);
  /// A line below the table.
  void note(std::string line) { notes_.push_back(std::move(line)); }
  /// Writes the table, and the JSON where options.json says. `peak_memory` in bytes is of the
  /// process that ran the engine.
  void write(const EngineInfo& info, const Machine& machine, const ModelConfig& config,
             int64_t peak_memory);
  /// The same where no model was run; `what` was.
  void write(const std::string& what, const std::string& device, const Machine& machine);

 private:
  std::string table(const std::string& heading, const Machine& machine) const;
  Json to_json(const std::string& device, const Machine& machine) const;
  void deliver(const Json& json, const std::string& text);

  std::string benchmark_;
  const BenchOptions& options_;
  std::vector<Column> columns_;
  Json rows_ = Json::array();
  std::vector<std::string> notes_;
  std::optional<Output> file_;
};

// One file each: the benchmarks.
void add_bench_throughput(CLI::App& bench, Action& action);
void add_bench_latency(CLI::App& bench, Action& action);
void add_bench_prefill(CLI::App& bench, Action& action);
void add_bench_startup(CLI::App& bench, Action& action);
void add_bench_step(CLI::App& bench, Action& action);
void add_bench_attention(CLI::App& bench, Action& action);
void add_bench_gemm(CLI::App& bench, Action& action);
void add_bench_quality(CLI::App& bench, Action& action);

}  // namespace nanovllm::cli
