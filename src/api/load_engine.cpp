#include "api/load_engine.h"

#include <algorithm>
#include <future>
#include <system_error>

#include "engine/request_checks.h"
#include "io/quantised/quantization.h"
#include "io/quantised/quantize.h"
#include "io/safetensors/checkpoint.h"
#include "kv_events/publisher.h"
#include "ranks/open_ranks.h"
#include "ranks/process_wait.h"
#include "weights/kv_cache.h"

namespace nanovllm {
namespace {

// Together, for chat models name different ones in config.json, generation_config.json, tokenizer.
std::vector<int32_t> eos_ids(const ModelConfig& model, const GenerationConfig& generation,
                             const Tokenizer* tokenizer) {
  std::vector<int32_t> ids;
  const auto add = [&](int64_t id) {
    const auto token = static_cast<int32_t>(id);
    if (std::find(ids.begin(), ids.end(), token) != ids.end()) return;
    check(std::ssize(ids) < kMaxEosIds, ErrorKind::model,
          "config.json and generation_config.json: more than {} ids in eos_token_id together",
          kMaxEosIds);
    ids.push_back(token);
  };
  for (const int64_t id : model.eos_token_ids) add(id);
  for (const int64_t id : generation.eos_token_ids) add(id);
  if (tokenizer && tokenizer->eos_token_id()) add(*tokenizer->eos_token_id());
  return ids;
}

/// Notes for the user, to be shown once: things ignored, found and chosen.
std::vector<std::string> notes(const ModelConfig& model, const EngineConfig& config,
                               const MemoryPlan& plan, const std::string& device) {
  std::vector<std::string> list = model.warnings;
  const int ranks = config.tensor_parallel_size;
  const auto share = [&](int64_t parameters) {
    return fmt::format("{:.0f} % of all parameters", 100.0 * static_cast<double>(parameters) /
                                                         static_cast<double>(plan.num_parameters));
  };
  if (model.quantization)
    list.push_back(fmt::format(
        "weights of {} are kept {} in memory", model.quantization->describe(),
        plan.num_quantised > 0 ? fmt::format("as they are, {},", share(plan.num_quantised))
                               : "in the model's dtype"));
  if (model.quantization && model.quantization->has_activations())
    list.push_back(plan.num_row_quantising > 0 ? fmt::format("activations are quantised, for {}",
                                                             share(plan.num_row_quantising))
                                               : "activations are not quantised here");
  const std::string keys = describe_kv_cache(model.quantization.get(), plan.cache_dtype);
  if (!keys.empty()) list.push_back(keys);
  list.push_back((ranks > 1 ? fmt::format("{} ranks, the first ", ranks) : "") + device);
  if (plan.limits.max_model_len < wanted_max_model_len(model, config))
    list.push_back(fmt::format("max_model_len is {}: the KV cache has room for no more",
                               plan.limits.max_model_len));
  return list;
}

/// `plan` is any rank's: what is said of it here is the same for all.
EngineInfo engine_info(const std::string& device, const ModelConfig& model,
                       const EngineConfig& config, const MemoryPlan& plan,
                       std::vector<RankInfo> ranks, const std::string& note) {
  EngineInfo info{.device = device,
                  .architecture = model.architecture,
                  .dtype = std::string(name_of(compute_dtype(model, config))),
                  .kv_cache_dtype = std::string(name_of(plan.cache_dtype)),
                  .quantization = model.quantization ? model.quantization->describe() : "",
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
  auto tokenizer = std::make_shared<const Tokenizer>(directory, model.vocab_size);
  check(tokenizer->vocab_size() <= model.vocab_size, ErrorKind::model,
        "tokenizer.json has the id {}, but config.json's vocab_size is {}",
        tokenizer->vocab_size() - 1, model.vocab_size);
  return tokenizer;
}

}  // namespace

EngineInfo plan_engine(const std::string& directory, const EngineConfig& config) {
  check_config(config);
  ModelConfig model = load_model_config(directory, config_defaults);
  choose_quantization(model, config.quantization, config.dequantize);
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
  LoadedEngine loaded;
  loaded.model =
      log.run("config.json", [&] { return load_model_config(directory, config_defaults); });
  choose_quantization(loaded.model, config.quantization, config.dequantize);
  check_parallel_size(loaded.model, config.tensor_parallel_size);
  const WatchForStoppedRanks watch("the others to start");
  RunnerLoader loader(loaded.model, config, log);
  auto publisher = open_kv_events(config.kv_events, config.block_size);
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

  std::string note;
  // On a CPU, loading takes all cores by itself.
  if (loader.wait_for_device(note).device().kind == Device::cpu) wait_for_tokenizer();
  auto [runner, ranks] = loader.load(checkpoint, decorate);
  log.run("close weights", [&] { checkpoint.reset(); });
  wait_for_tokenizer();
  if (loaded.tokenizer && !loaded.tokenizer->left_out().empty())
    loaded.model.warnings.push_back(fmt::format(
        "config.json's vocab_size is {}: tokenizer.json's added token {} is text like any other",
        loaded.model.vocab_size, quote(loaded.tokenizer->left_out())));
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
    loaded.engine->publish_events_to(std::move(publisher));
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

}  // namespace nanovllm
