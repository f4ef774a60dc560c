#include "engine/load_engine.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <future>
#include <mutex>
#include <system_error>

#include "core/seconds.h"
#include "engine/kv_events/publisher.h"
#include "engine/model_runner.h"
#include "engine/ranks/open_ranks.h"
#include "engine/ranks/process_runner.h"
#include "engine/ranks/rank_group.h"
#include "engine/request_checks.h"
#include "io/checkpoint.h"

namespace nanovllm {
namespace {

// config.json's, generation_config.json's and the tokenizer's together: chat models name different
// ones in each.
std::vector<int32_t> eos_ids(const ModelConfig& model, const GenerationConfig& generation,
                             const Tokenizer* tokenizer) {
  std::vector<int32_t> ids;
  const auto add = [&](int64_t id) {
    const auto token = static_cast<int32_t>(id);
    if (std::find(ids.begin(), ids.end(), token) == ids.end()) ids.push_back(token);
  };
  for (const int64_t id : model.eos_token_ids) add(id);
  for (const int64_t id : generation.eos_token_ids) add(id);
  if (tokenizer && tokenizer->eos_token_id()) add(*tokenizer->eos_token_id());
  check(std::ssize(ids) <= kMaxEosIds, ErrorKind::model,
        "config.json and generation_config.json: {} ids in eos_token_id together, at most {} are "
        "supported",
        ids.size(), kMaxEosIds);
  return ids;
}

/// Notes for the user, to be shown once: things ignored, found and chosen.
std::vector<std::string> notes(const ModelConfig& model, const EngineConfig& config,
                               const MemoryPlan& plan, const std::string& device) {
  std::vector<std::string> list = model.warnings;
  const int ranks = config.tensor_parallel_size;
  list.push_back((ranks > 1 ? fmt::format("{} ranks, the first ", ranks) : "") + device);
  const int64_t usual = std::min<int64_t>(4096, model.max_position_embeddings);
  if (config.max_model_len == 0 && plan.limits.max_model_len < usual)
    list.push_back(fmt::format("max_model_len is {}: the KV cache has room for no more",
                               plan.limits.max_model_len));
  return list;
}

RankInfo rank_info(const std::string& device, const MemoryPlan& plan) {
  return {.device = device,
          .weight_bytes = static_cast<int64_t>(plan.weights),
          .workspace_bytes = static_cast<int64_t>(plan.workspace),
          .kv_cache_bytes = static_cast<int64_t>(plan.kv_cache()),
          .available_bytes = static_cast<int64_t>(plan.available)};
}

/// `plan` is any rank's: what is said of it here is the same for all.
EngineInfo engine_info(const std::string& device, const ModelConfig& model,
                       const EngineConfig& config, const MemoryPlan& plan,
                       std::vector<RankInfo> ranks, const std::string& note) {
  EngineInfo info{.device = device,
                  .architecture = model.architecture,
                  .dtype = std::string(name_of(compute_dtype(model, config))),
                  .num_parameters = count_parameters(model),
                  .num_blocks = plan.num_blocks,
                  .block_size = plan.limits.block_size,
                  .max_model_len = plan.limits.max_model_len,
                  .vocab_size = model.vocab_size,
                  .max_num_seqs = plan.limits.max_num_seqs,
                  .max_num_batched_tokens = plan.limits.max_num_batched_tokens,
                  .ranks = std::move(ranks),
                  .notes = notes(model, config, plan, note)};
  for (const RankInfo& rank : info.ranks) {
    info.weight_bytes += rank.weight_bytes;
    info.workspace_bytes += rank.workspace_bytes;
    info.kv_cache_bytes += rank.kv_cache_bytes;
    info.available_bytes += rank.available_bytes;
  }
  return info;
}

std::shared_ptr<const Tokenizer> read_tokenizer(const std::string& directory,
                                                const ModelConfig& model) {
  auto tokenizer = std::make_shared<const Tokenizer>(directory);
  check(tokenizer->vocab_size() <= model.vocab_size, ErrorKind::model,
        "tokenizer.json has the id {}, but config.json's vocab_size is {}",
        tokenizer->vocab_size() - 1, model.vocab_size);
  return tokenizer;
}

/// When each part of a start began and ended; parts run on several threads.
class PhaseLog {
 public:
  /// body(), timed.
  template <class Body>
  auto run(const char* name, Body&& body) {
    const double begin = now();
    const auto add = [&] {
      const std::lock_guard lock(mutex_);
      phases_.push_back({name, begin, now()});
    };
    if constexpr (std::is_void_v<decltype(body())>) {
      body();
      add();
    } else {
      auto result = body();
      add();
      return result;
    }
  }
  std::vector<StartupPhase> phases() const { return phases_; }

 private:
  double now() const { return seconds_since(start_); }
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::mutex mutex_;
  std::vector<StartupPhase> phases_;
};

/// The GPU of a rank of this host, where `device`, "auto", "cuda" or "cuda:N", says the first
/// one's.
std::string gpu_of_rank(const std::string& device, int rank) {
  const int first = device.starts_with("cuda:") ? std::atoi(device.c_str() + 5) : 0;
  return fmt::format("cuda:{}", first + rank);
}

using OpeningDevice = std::future<std::unique_ptr<Backend>>;

/// Begins to open the GPUs of ranks 1, 2, ... of this process, all at the same time as rank 0's:
/// each takes its driver a while. None where all ranks are shares of a CPU.
std::vector<OpeningDevice> open_other_gpus(const EngineConfig& config, bool is_one_process) {
  std::vector<OpeningDevice> gpus;
  if (config.device == "cpu" || !is_one_process) return gpus;
  const int world = config.tensor_parallel_size;
  const BackendOptions options{threads_per_rank(config.num_threads, world)};
  for (int rank = 1; rank < world; ++rank)
    gpus.push_back(std::async(std::launch::async, [=, device = gpu_of_rank(config.device, rank)] {
      return make_backend(device, options);
    }));
  return gpus;
}

/// The first device is open, and `others` may be.
std::unique_ptr<RankGroup> make_ranks(std::unique_ptr<Backend> first,
                                      std::vector<OpeningDevice> others, const ModelConfig& model,
                                      const EngineConfig& config,
                                      const BackendDecorator& decorate) {
  const int world = config.tensor_parallel_size,
            threads = threads_per_rank(config.num_threads, world);
  const bool is_cpu = first->device().kind == Device::cpu;  // the others are no GPUs either
  const auto rank_0 = std::make_shared<std::unique_ptr<Backend>>(std::move(first));
  const auto gpus = std::make_shared<std::vector<OpeningDevice>>(std::move(others));
  const auto open = [=](int rank) {
    if (rank == 0) return std::move(*rank_0);
    auto own =
        is_cpu ? make_backend("cpu", {threads}) : (*gpus)[static_cast<size_t>(rank - 1)].get();
    return decorate ? decorate(std::move(own)) : std::move(own);
  };
  return std::make_unique<RankGroup>(world, open, model, config);
}

std::vector<RankInfo> describe_ranks(const RankGroup& group, int world) {
  std::vector<RankInfo> ranks;
  for (int rank = 0; rank < world; ++rank)
    ranks.push_back(rank_info(group.device_name(rank), group.memory(rank)));
  return ranks;
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

/// A runner with its weights, and what there is to say about each of its ranks.
std::pair<std::unique_ptr<Runner>, std::vector<RankInfo>> load_runner(
    std::unique_ptr<Backend> device, std::vector<OpeningDevice> others, const ModelConfig& model,
    const EngineConfig& config, const std::shared_ptr<const Checkpoint>& checkpoint,
    std::unique_ptr<ProcessGroup> processes, const BackendDecorator& decorate, PhaseLog& log) {
  const LoadProgress progress = [&](int64_t done, int64_t total) {
    if (config.on_progress) config.on_progress("loading weights", done, total);
  };
  if (processes) {
    auto runner = log.run("memory", [&] {
      return make_process_runner(std::move(processes), std::move(device), model, config);
    });
    log.run("weights", [&] { runner->load(checkpoint.get(), config.seed, progress); });
    std::vector<RankInfo> ranks(static_cast<size_t>(config.tensor_parallel_size),
                                rank_info(runner->device_name(), runner->memory()));
    return {std::move(runner), std::move(ranks)};
  }
  if (config.tensor_parallel_size > 1) {
    auto group = log.run("memory", [&] {
      return make_ranks(std::move(device), std::move(others), model, config, decorate);
    });
    log.run("weights", [&] { group->load(checkpoint, config.seed, progress); });
    auto ranks = describe_ranks(*group, config.tensor_parallel_size);
    return {std::move(group), std::move(ranks)};
  }
  auto runner = log.run("memory", [&] {
    return std::make_unique<ModelRunner>(std::move(device), std::make_unique<SingleCommunicator>(),
                                         model, config);
  });
  log.run("weights", [&] { runner->load(checkpoint.get(), config.seed, progress); });
  std::vector<RankInfo> rank = {rank_info(runner->device_name(), runner->memory())};
  return {std::move(runner), std::move(rank)};
}

}  // namespace

EngineInfo plan_engine(const std::string& directory, const EngineConfig& config) {
  check_config(config);
  const ModelConfig model = load_model_config(directory, config_defaults);
  const int world = config.tensor_parallel_size;
  check_parallel_size(model, world);
  std::string note;
  const auto ops =
      make_backend(config.device, {threads_per_rank(config.num_threads, world)}, &note);
  std::vector<RankInfo> ranks;
  MemoryPlan plan;
  for (int rank = 0; rank < world; ++rank) {
    plan = plan_memory(*ops, model, config, compute_dtype(model, config), {rank, world}, world);
    ranks.push_back(rank_info(rank == 0 ? ops->name() : device_of_rank(*ops, rank), plan));
  }
  return engine_info(ops->name(), model, config, plan, std::move(ranks), note);
}

namespace {

// Parts that need nothing of each other run at once: opening a GPU takes longer than reading all
// files but the weights.
LoadedEngine load_parts(const std::string& directory, const EngineConfig& config,
                        const BackendDecorator& decorate) {
  check_config(config);
  PhaseLog log;
  std::string note;
  LoadedEngine loaded;
  loaded.model =
      log.run("config.json", [&] { return load_model_config(directory, config_defaults); });
  check_parallel_size(loaded.model, config.tensor_parallel_size);
  const WatchForStoppedRanks watch("the others to start");
  auto processes = join_ranks(config);
  auto publisher = open_kv_events(config.kv_events, config.block_size);
  OpeningDevice device = std::async(std::launch::async, [&] {
    return log.run("device", [&] { return open_device(config, processes.get(), &note); });
  });
  std::vector<OpeningDevice> others = open_other_gpus(config, !processes);
  std::future<std::shared_ptr<const Tokenizer>> tokenizer;
  if (!config.skip_tokenizer_init)
    tokenizer = std::async(std::launch::async, [&] {
      return log.run("tokenizer", [&] { return read_tokenizer(directory, loaded.model); });
    });
  loaded.generation = load_generation_config(directory, loaded.model.vocab_size);
  std::shared_ptr<const Checkpoint> checkpoint;
  if (config.load_format != "dummy")
    checkpoint =
        log.run("open weights", [&] { return std::make_shared<const Checkpoint>(directory); });
  const auto wait_for_tokenizer = [&] {
    if (tokenizer.valid()) loaded.tokenizer = tokenizer.get();
  };

  auto ops = device.get();
  // On a CPU, loading takes all cores by itself.
  if (ops->device().kind == Device::cpu) wait_for_tokenizer();
  if (decorate) ops = decorate(std::move(ops));
  auto [runner, ranks] = load_runner(std::move(ops), std::move(others), loaded.model, config,
                                     checkpoint, std::move(processes), decorate, log);
  log.run("close weights", [&] { checkpoint.reset(); });
  wait_for_tokenizer();
  loaded.info = engine_info(runner->device_name(), loaded.model, config, runner->memory(),
                            std::move(ranks), note);
  loaded.info.startup = log.phases();
  loaded.eos = eos_ids(loaded.model, loaded.generation, loaded.tokenizer.get());
  loaded.engine = std::make_unique<LLMEngine>(std::move(runner), loaded.model, config,
                                              loaded.tokenizer, loaded.eos);
  if (publisher) {
    loaded.info.notes.push_back(
        fmt::format("KV events on {}{}", publisher->endpoints(),
                    is_open_to_others(config.kv_events)
                        ? ": they carry the token ids of prompts, and other machines may read them"
                        : ""));
    loaded.engine->publish_events(std::move(publisher));
  }
  return loaded;
}

}  // namespace

LoadedEngine load_engine(const std::string& directory, const EngineConfig& config,
                         const BackendDecorator& decorate) {
  try {
    return load_parts(directory, config, decorate);
  } catch (const std::system_error& error) {
    check(error.code() != std::errc::resource_unavailable_try_again, ErrorKind::device,
          "no thread can be started: {}; raise the limit on processes (ulimit -u)", error.what());
    throw;
  }
}

namespace {

void serve(const std::string& directory, const EngineConfig& config) {
  const ModelConfig model = load_model_config(directory, config_defaults);
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
