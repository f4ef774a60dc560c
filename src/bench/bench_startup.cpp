// nanovllm bench startup: from exec to the first token, in processes started for it.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>

#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/bench.h"
#include "bench/roofline/machine.h"
#include "cli/exit_code.h"
#include "cli/terminal/output.h"
#include "core/check.h"
#include "models/model.h"

namespace nanovllm::cli {
namespace {

struct StartupOptions : BenchOptions {
  int64_t input_len = 16;
  bool child = false;  // this is one of the processes that are measured
};

// The monotonic clock is the same for all processes of a machine.
double now() { return to_seconds(std::chrono::steady_clock::now().time_since_epoch()); }

/// Points in time of one start.
struct Start {
  double exec = 0, running = 0, ready = 0, first_token = 0;
  int64_t peak_memory = 0;
  Json phases;  // [name, begin, end], in seconds since `running`
};

// The measured process: it loads the model as a user's would and answers one prompt.
int run_child(const StartupOptions& options) {
  const double running = now();
  EngineConfig config = options.engine;
  if (!std::filesystem::exists(options.model + "/tokenizer.json"))
    config.skip_tokenizer_init = true;
  LLM llm(options.model, config);
  const double ready = now();
  SamplingParams params;
  params.temperature = 0;
  params.max_tokens = 1;
  params.ignore_eos = true;
  const auto outputs =
      llm.generate({std::vector<int32_t>(static_cast<size_t>(options.input_len), 1)}, params);
  const double first_token = now();
  check(outputs[0].outputs[0].finish_reason != FinishReason::error, ErrorKind::invalid_argument,
        "{}", outputs[0].error);
  Json phases = Json::array();
  for (const StartupPhase& phase : llm.info().startup)
    phases.push_back({phase.name, phase.begin, phase.end});
  Output output;
  output.write(Json{running, ready, first_token, peak_memory(), phases}.dump() + "\n");
  output.close();
  return kExitDone;
}

// This process's own command line, and the sign that the new one is measured.
std::vector<std::string> child_command() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  std::vector<std::string> arguments;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\0', begin), text.size());
    arguments.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  arguments.emplace_back("--measured-process");
  return arguments;
}

std::string read_all(int descriptor) {
  std::string text;
  std::array<char, 4096> buffer;
  while (true) {
    const ssize_t n = ::read(descriptor, buffer.data(), buffer.size());
    if (n > 0)
      text.append(buffer.data(), static_cast<size_t>(n));
    else if (n == 0 || errno != EINTR)
      return text;
  }
}

/// Nothing, and its exit code, of a process that failed: it has said why.
std::optional<Start> measure_start(int& exit_code) {
  std::vector<std::string> command = child_command();
  std::vector<char*> argv;
  for (std::string& argument : command) argv.push_back(argument.data());
  argv.push_back(nullptr);
  int ends[2];
  check(::pipe(ends) == 0, "pipe: {}", std::strerror(errno));
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  ::posix_spawn_file_actions_addclose(&actions, ends[0]);
  ::posix_spawn_file_actions_addclose(&actions, ends[1]);
  pid_t child = 0;
  Start start;
  start.exec = now();
  const int error =
      ::posix_spawn(&child, "/proc/self/exe", &actions, nullptr, argv.data(), ::environ);
  ::posix_spawn_file_actions_destroy(&actions);
  ::close(ends[1]);
  const std::string text = error == 0 ? read_all(ends[0]) : "";
  ::close(ends[0]);
  check(error == 0, "the program cannot start itself: {}", std::strerror(error));
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  check(WIFEXITED(status), "a measured process was killed by signal {}", WTERMSIG(status));
  exit_code = WEXITSTATUS(status);
  if (exit_code != kExitDone) return std::nullopt;
  const Json times = parse_json(text, "measured process", ErrorKind::engine);
  start.running = times.at(0).get<double>();
  start.ready = times.at(1).get<double>();
  start.first_token = times.at(2).get<double>();
  start.peak_memory = times.at(3).get<int64_t>();
  start.phases = times.at(4);
  return start;
}

// The median of each phase, in the first start's order.
Json median_phases(const std::vector<Start>& starts) {
  Json rows = Json::array();
  for (const Json& first : starts.front().phases) {
    std::vector<double> begins, ends;
    for (const Start& start : starts)
      for (const Json& phase : start.phases)
        if (phase.at(0) == first.at(0)) {
          begins.push_back(phase.at(1).get<double>());
          ends.push_back(phase.at(2).get<double>());
        }
    rows.push_back({{"phase", first.at(0)}, {"begin", median(begins)}, {"end", median(ends)}});
  }
  return rows;
}

std::string phases_text(const Json& phases) {
  std::string text = "engine, ms since its start:";
  for (const Json& phase : phases)
    text += fmt::format("{} {} {:.0f} to {:.0f}", &phase == &phases.front() ? "" : ",",
                        phase.at("phase").get<std::string>(), 1e3 * phase.at("begin").get<double>(),
                        1e3 * phase.at("end").get<double>());
  return text;
}

int bench_startup(const StartupOptions& options) {
  require_model(options.model);
  if (options.child) return run_child(options);
  std::vector<Start> starts;
  std::vector<double> program, load, token, whole;
  int64_t memory = 0;
  for (int64_t i = 0; i < options.repetitions; ++i) {
    int exit_code = kExitDone;
    const std::optional<Start> start = measure_start(exit_code);
    if (!start) return exit_code;
    program.push_back(start->running - start->exec);
    load.push_back(start->ready - start->running);
    token.push_back(start->first_token - start->ready);
    whole.push_back(start->first_token - start->exec);
    memory = std::max(memory, start->peak_memory);
    starts.push_back(*start);
  }
  // Only now: while another process holds the GPU, opening it may take less time.
  EngineConfig config = options.engine;
  config.skip_tokenizer_init = true;
  const EngineInfo plan = nanovllm::inspect(options.model, config);
  const Machine machine = find_machine(options, plan);
  const ModelConfig model = load_model_config(options.model, config_defaults);
  Json floor;
  if (machine.rates.bytes_per_second > 0) {
    // The weights cross once: out of memory on the CPU, over PCIe (55 GB/s) to a GPU.
    const bool cpu = plan.device.starts_with("cpu");
    floor = double(plan.weight_bytes) / (cpu ? machine.rates.bytes_per_second : 55e9);
  }
  BenchReport report("startup", options,
                     {{"test", "test"},
                      {"program", "program, s", 3},
                      {"load", "engine, s", 3},
                      {"first_token", "first token, s", 3},
                      {"measured", "exec to first token, s", 3},
                      {"worst", "worst", 3},
                      {"floor", "weights once, s", 3},
                      {"share", "of the floor"}});
  report.add({{"test", "startup"},
              {"runs", options.repetitions},
              {"program", median(program)},
              {"load", median(load)},
              {"first_token", median(token)},
              {"measured", median(whole)},
              {"worst", quantile(whole, 1)},
              {"floor", floor},
              {"phases", median_phases(starts)}});
  report.note(phases_text(median_phases(starts)));
  report.write(plan, machine, model, memory);
  return kExitDone;
}

}  // namespace

void add_bench_startup(CLI::App& bench, Action& action) {
  auto options = std::make_shared<StartupOptions>();
  StartupOptions& o = *options;
  CLI::App& command = add_benchmark(bench, "startup", "Time from exec to the first token", o);
  add_value(command, "--input-len", "N", "prompt tokens (16)",
            [&o](const std::string& s) { o.input_len = parse_integer(s, 1, 1 << 24); });
  add_flag(command, "--measured-process", o.child, "");
  set_action(command, action, [options] { return bench_startup(*options); });
}

}  // namespace nanovllm::cli
