#include "ranks/load_runner.h"

#include "engine/model_runner.h"
#include "engine/request_checks.h"
#include "io/quantised/quantize.h"
#include "io/safetensors/checkpoint.h"
#include "ranks/open_ranks.h"
#include "ranks/process_runner.h"
#include "ranks/rank_group.h"

namespace nanovllm {
namespace {

/// The GPU of a rank of this host, where `device`, "auto", "cuda" or "cuda:N", says the first
/// one's.
std::string gpu_of_rank(const std::string& device, int rank) {
  const int first = device.starts_with("cuda:") ? std::atoi(device.c_str() + 5) : 0;
  return fmt::format("cuda:{}", first + rank);
}

/// Joins what mpirun started, if it did: one process per rank.
std::unique_ptr<ProcessGroup> join_ranks(const EngineConfig& config) {
  const int processes = process_place().count;
  if (processes == 1) return nullptr;
  check(processes == config.tensor_parallel_size, ErrorKind::invalid_argument,
        "mpirun started {} processes, but tensor_parallel_size is {}: give both the same number",
        processes, config.tensor_parallel_size);
  const WaitForProcesses wait("the others to start", kOpenPatience);
  return join_processes();
}

/// The device of this process: on GPUs, ranks of one host take those from `device` on.
std::unique_ptr<Backend> open_device(const EngineConfig& config, const ProcessGroup* processes,
                                     std::string* note) {
  const int ranks = processes ? processes->ranks_on_host() : config.tensor_parallel_size;
  const BackendOptions options{threads_per_rank(config.num_threads, ranks)};
  if (!processes || processes->rank_on_host() == 0)
    return make_backend(config.device, options, note);
  const std::string& device = config.device;
  const int rank = processes->rank_on_host();
  if (device == "cpu") return make_backend(device, options, note);
  const std::string own = gpu_of_rank(device, rank);
  if (device != "auto") return make_backend(own, options, note);
  try {
    return make_backend(own, options, note);
  } catch (const Error&) {  // as rank 0 of the host does where it finds no GPU
    return make_backend("cpu", options, note);
  }
}

void serve(const std::string& directory, const EngineConfig& config) {
  ModelConfig model = load_model_config(directory, config_defaults);
  choose_quantization(model, config.quantization, config.dequantize);
  check_parallel_size(model, config.tensor_parallel_size);
  std::unique_ptr<const Checkpoint> checkpoint;
  if (config.load_format != "dummy") checkpoint = std::make_unique<const Checkpoint>(directory);
  std::unique_ptr<ProcessRunner> runner;
  {
    const WatchForStoppedRanks watch("the others to start");
    auto group = join_ranks(config);
    auto device = open_device(config, group.get(), nullptr);
    runner = make_process_runner(std::move(group), std::move(device), model, config);
    runner->load(checkpoint.get(), config.seed, {});
  }
  runner->serve();
}

}  // namespace

RankInfo rank_info(const std::string& device, const MemoryPlan& plan) {
  return {.device = device,
          .weight_bytes = static_cast<int64_t>(plan.weights),
          .workspace_bytes = static_cast<int64_t>(plan.workspace),
          .kv_cache_bytes = static_cast<int64_t>(plan.kv_cache()),
          .available_bytes = static_cast<int64_t>(plan.available)};
}

RunnerLoader::RunnerLoader(const ModelConfig& model, const EngineConfig& config, PhaseLog& log)
    : model_(model), config_(config), log_(log), processes_(join_ranks(config)) {
  opening_ = std::async(std::launch::async, [this] {
    return log_.run("device", [&] { return open_device(config_, processes_.get(), &note_); });
  });
  // All at the same time: each GPU takes its driver a while. None where ranks share a CPU.
  if (config.device == "cpu" || processes_) return;
  const int world = config.tensor_parallel_size;
  const BackendOptions options{threads_per_rank(config.num_threads, world)};
  for (int rank = 1; rank < world; ++rank)
    others_.push_back(std::async(
        std::launch::async,
        [=, device = gpu_of_rank(config.device, rank)] { return make_backend(device, options); }));
}

const Backend& RunnerLoader::wait_for_device(std::string& note) {
  first_ = opening_.get();
  note = note_;
  return *first_;
}

LoadedRunner RunnerLoader::load(const std::shared_ptr<const Checkpoint>& checkpoint,
                                const BackendDecorator& decorate) {
  const LoadProgress progress = [&](int64_t done, int64_t total) {
    if (config_.on_progress) config_.on_progress("loading weights", done, total);
  };
  if (decorate) first_ = decorate(std::move(first_));
  if (processes_) return load_processes(checkpoint, progress);
  if (config_.tensor_parallel_size > 1) return load_group(checkpoint, decorate, progress);
  auto runner = log_.run("memory", [&] {
    return std::make_unique<ModelRunner>(std::move(first_), std::make_unique<SingleCommunicator>(),
                                         model_, config_);
  });
  log_.run("weights", [&] { runner->load(checkpoint.get(), config_.seed, progress); });
  std::vector<RankInfo> rank = {rank_info(runner->device_name(), runner->memory())};
  return {std::move(runner), std::move(rank)};
}

LoadedRunner RunnerLoader::load_processes(const std::shared_ptr<const Checkpoint>& checkpoint,
                                          const LoadProgress& progress) {
  auto runner = log_.run("memory", [&] {
    return make_process_runner(std::move(processes_), std::move(first_), model_, config_);
  });
  log_.run("weights", [&] { runner->load(checkpoint.get(), config_.seed, progress); });
  std::vector<RankInfo> ranks(static_cast<size_t>(config_.tensor_parallel_size),
                              rank_info(runner->device_name(), runner->memory()));
  return {std::move(runner), std::move(ranks)};
}

LoadedRunner RunnerLoader::load_group(const std::shared_ptr<const Checkpoint>& checkpoint,
                                      const BackendDecorator& decorate,
                                      const LoadProgress& progress) {
  const int world = config_.tensor_parallel_size,
            threads = threads_per_rank(config_.num_threads, world);
  const bool is_cpu = first_->device().kind == Device::cpu;  // the others are no GPUs either
  const auto rank_0 = std::make_shared<std::unique_ptr<Backend>>(std::move(first_));
  const auto gpus = std::make_shared<std::vector<OpeningDevice>>(std::move(others_));
  const auto open = [=](int rank) {
    if (rank == 0) return std::move(*rank_0);
    auto own =
        is_cpu ? make_backend("cpu", {threads}) : (*gpus)[static_cast<size_t>(rank - 1)].get();
    return decorate ? decorate(std::move(own)) : std::move(own);
  };
  auto group =
      log_.run("memory", [&] { return std::make_unique<RankGroup>(world, open, model_, config_); });
  log_.run("weights", [&] { group->load(checkpoint, config_.seed, progress); });
  std::vector<RankInfo> ranks;
  for (int rank = 0; rank < world; ++rank)
    ranks.push_back(rank_info(group->device_name(rank), group->memory(rank)));
  return {std::move(group), std::move(ranks)};
}

bool serve_engine_rank(const std::string& directory, const EngineConfig& config) {
  if (process_place().count == 1 || process_place().rank == 0) return false;
  check_config(config);
  try {
    serve(directory, config);
  } catch (const Error& error) {
    const ProcessPlace place = process_place();
    throw Error(error.kind(), describe({place.rank, error.kind(), error.what()}, place.count));
  }
  return true;
}

}  // namespace nanovllm
