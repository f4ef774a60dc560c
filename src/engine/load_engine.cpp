#include "engine/load_engine.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <future>
#include <mutex>

#include "engine/model_runner.h"
#include "engine/request_checks.h"
#include "io/checkpoint.h"

namespace nanovllm {
namespace {

ModelConfig read_model_config(const std::string& directory) {
  check(std::filesystem::exists(directory), ErrorKind::model,
        "{}: no such directory; give a Hugging Face model directory", directory);
  check(std::filesystem::is_directory(directory), ErrorKind::model,
        "{} is not a directory; give a Hugging Face model directory", directory);
  std::vector<std::string_view> supported;
  for (const Architecture& entry : architectures()) supported.emplace_back(entry.name);
  return load_model_config(directory, supported);
}

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

/// What a user should hear once: what was ignored, found and chosen.
std::vector<std::string> notes(const ModelConfig& model, const EngineConfig& config,
                               const MemoryPlan& plan, const std::string& device) {
  std::vector<std::string> list = model.warnings;
  list.push_back(device);
  const int64_t usual = std::min<int64_t>(4096, model.max_position_embeddings);
  if (config.max_model_len == 0 && plan.limits.max_model_len < usual)
    list.push_back(fmt::format("max_model_len is {}: the KV cache has room for no more",
                               plan.limits.max_model_len));
  return list;
}

EngineInfo describe(const std::string& device, const ModelConfig& model, const EngineConfig& config,
                    const MemoryPlan& plan, const std::string& note) {
  return {.device = device,
          .architecture = model.architecture,
          .dtype = std::string(name_of(compute_dtype(model, config))),
          .num_parameters = plan.num_parameters,
          .weight_bytes = static_cast<int64_t>(plan.weights),
          .workspace_bytes = static_cast<int64_t>(plan.workspace),
          .kv_cache_bytes = static_cast<int64_t>(plan.kv_cache()),
          .available_bytes = static_cast<int64_t>(plan.available),
          .num_blocks = plan.num_blocks,
          .block_size = plan.limits.block_size,
          .max_model_len = plan.limits.max_model_len,
          .vocab_size = model.vocab_size,
          .max_num_seqs = plan.limits.max_num_seqs,
          .max_num_batched_tokens = plan.limits.max_num_batched_tokens,
          .notes = notes(model, config, plan, note)};
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
  double now() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::mutex mutex_;
  std::vector<StartupPhase> phases_;
};

}  // namespace

EngineInfo plan_engine(const std::string& directory, const EngineConfig& config) {
  check_config(config);
  const ModelConfig model = read_model_config(directory);
  std::string note;
  const auto ops = make_backend(config.device, {config.num_threads}, &note);
  const MemoryPlan plan = plan_memory(*ops, model, config, compute_dtype(model, config), {});
  return describe(ops->name(), model, config, plan, note);
}

// What needs nothing of each other runs at once: opening a GPU takes longer than reading all files
// but the weights.
LoadedEngine load_engine(const std::string& directory, const EngineConfig& config,
                         const BackendDecorator& decorate) {
  check_config(config);
  PhaseLog log;
  std::string note;
  LoadedEngine loaded;
  loaded.model = log.run("config.json", [&] { return read_model_config(directory); });
  std::future<std::unique_ptr<Backend>> device = std::async(std::launch::async, [&] {
    return log.run("device",
                   [&] { return make_backend(config.device, {config.num_threads}, &note); });
  });
  std::future<std::shared_ptr<const Tokenizer>> tokenizer;
  if (!config.skip_tokenizer_init)
    tokenizer = std::async(std::launch::async, [&] {
      return log.run("tokenizer", [&] { return read_tokenizer(directory, loaded.model); });
    });
  loaded.generation = load_generation_config(directory, loaded.model.vocab_size);
  std::unique_ptr<Checkpoint> checkpoint;
  if (config.load_format != "dummy")
    checkpoint = log.run("open weights", [&] { return std::make_unique<Checkpoint>(directory); });
  const auto wait_for_tokenizer = [&] {
    if (tokenizer.valid()) loaded.tokenizer = tokenizer.get();
  };

  auto ops = device.get();
  // On a CPU, loading takes all cores by itself.
  if (ops->device().kind == Device::cpu) wait_for_tokenizer();
  if (decorate) ops = decorate(std::move(ops));
  auto runner = log.run("memory", [&] {
    return std::make_unique<ModelRunner>(std::move(ops), std::make_unique<SingleCommunicator>(),
                                         loaded.model, config);
  });
  log.run("weights", [&] {
    runner->load(checkpoint.get(), config.seed, [&](int64_t done, int64_t total) {
      if (config.on_progress) config.on_progress("loading weights", done, total);
    });
  });
  log.run("close weights", [&] { checkpoint.reset(); });
  wait_for_tokenizer();
  loaded.info = describe(runner->device_name(), loaded.model, config, runner->memory(), note);
  loaded.info.startup = log.phases();
  loaded.engine =
      std::make_unique<LLMEngine>(std::move(runner), loaded.model, config, loaded.tokenizer,
                                  eos_ids(loaded.model, loaded.generation, loaded.tokenizer.get()));
  return loaded;
}

}  // namespace nanovllm
