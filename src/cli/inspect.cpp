// nanovllm inspect: what a model is, the memory it would take, and how many sequences would fit.
#include "cli/inspect.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <string_view>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "bench/roofline/machine.h"
#include "cli/command.h"
#include "cli/exit_code.h"
#include "cli/options.h"
#include "cli/terminal/output.h"
#include "cli/terminal/table.h"
#include "core/check.h"
#include "engine/memory_plan.h"
#include "io/quantised/quantization.h"
#include "io/quantised/quantize.h"
#include "io/utf8.h"
#include "models/model.h"

namespace nanovllm::cli {
namespace {

constexpr int64_t kFloorContext = 1024;  // tokens

struct InspectOptions {
  std::string model;
  EngineConfig engine;
  bool json = false;
};

int64_t total_of(const RankInfo& rank) {
  return rank.weight_bytes + rank.workspace_bytes + rank.kv_cache_bytes;
}

/// A table of the ranks' shares of memory; nothing for one rank alone.
std::string describe_ranks(const EngineInfo& i) {
  if (i.ranks.size() < 2) return "";
  Table table({"rank", "weights", "workspace", "KV cache", "together", "available", "device"});
  for (size_t r = 0; r < i.ranks.size(); ++r) {
    const RankInfo& rank = i.ranks[r];
    table.add({std::to_string(r), binary_size(rank.weight_bytes), binary_size(rank.workspace_bytes),
               binary_size(rank.kv_cache_bytes), binary_size(total_of(rank)),
               binary_size(rank.available_bytes), rank.device});
  }
  return table.markdown() + "\n";
}

std::string describe_model(const EngineInfo& i) {
  Table facts({"model", ""});
  facts.add({"architecture", i.architecture});
  const double count = double(i.num_parameters);
  facts.add({"parameters", with_commas(i.num_parameters) +
                               (count >= 1e9 ? fmt::format(" ({:.3g} B)", count / 1e9)
                                             : fmt::format(" ({:.3g} M)", count / 1e6))});
  facts.add({"dtype", i.dtype});
  if (!i.quantization.empty()) facts.add({"quantization", i.quantization});
  facts.add({"vocabulary", with_commas(i.vocab_size)});
  facts.add({i.ranks.size() > 1 ? "device of rank 0" : "device", i.device});
  facts.add({"max_model_len", with_commas(i.max_model_len) + " tokens"});
  facts.add({"max_num_seqs", with_commas(i.max_num_seqs)});
  facts.add({"max_num_batched_tokens", with_commas(i.max_num_batched_tokens)});

  Table memory({i.ranks.size() > 1 ? "memory, all ranks" : "memory", "bytes", ""});
  const auto line = [&](const char* name, int64_t bytes) {
    memory.add({name, with_commas(bytes), binary_size(bytes)});
  };
  line("weights", i.weight_bytes);
  line("workspace", i.workspace_bytes);
  line("KV cache", i.kv_cache_bytes);
  line("together", i.weight_bytes + i.workspace_bytes + i.kv_cache_bytes);
  line("available", i.available_bytes);

  Table fits({"what fits into the KV cache", ""});
  fits.add({"keys and values", i.kv_cache_dtype});
  fits.add({"blocks", fmt::format("{} of {} tokens", with_commas(i.num_blocks), i.block_size)});
  fits.add({"tokens", with_commas(i.num_blocks * i.block_size)});
  fits.add({fmt::format("sequences of {} tokens at once", with_commas(i.max_model_len)),
            with_commas(fitting_sequences(i, i.max_model_len))});
  if (i.max_model_len > 1024)
    fits.add({"sequences of 1,024 tokens at once", with_commas(fitting_sequences(i, 1024))});
  return facts.markdown() + "\n" + memory.markdown() + "\n" + describe_ranks(i) + fits.markdown();
}

/// The weights in one format: the checkpoint's own, or one that an option makes of it.
struct FormatFacts {
  std::string name;
  int64_t weight_bytes = 0;
  double read_bytes = 0;      // by a decode step of one sequence of kFloorContext tokens
  double floor_seconds = 0;   // of that step, where the GPU's bandwidth is known
  int64_t gpu_gigabytes = 0;  // of the smallest GPUs that hold it, one for each rank; 0: none does
  int64_t tokens_beside = 0;  // of KV cache, in what is available on this device
};

FormatFacts format_facts(const EngineInfo& info, const ModelConfig& config, std::string name) {
  const auto ranks = static_cast<int64_t>(info.ranks.size());
  const DType dtype = dtype_named(info.dtype);
  const WeightReads reads = count_reads(config, dtype);
  const Roofline roofline(config, reads, dtype_named(info.kv_cache_dtype), known_gpu_rates("H200"),
                          static_cast<int>(ranks));
  FormatFacts facts{.name = std::move(name)};
  facts.weight_bytes =
      static_cast<int64_t>(reads.layers.bytes + reads.experts.bytes + reads.head.bytes) +
      reads.embeddings * static_cast<int64_t>(size_of(dtype));
  facts.read_bytes = roofline.decode_bytes(1, kFloorContext);
  facts.floor_seconds = roofline.decode_step(1, kFloorContext);
  const int64_t per_token = info.num_blocks > 0
                                ? info.kv_cache_bytes / (info.num_blocks * info.block_size)
                                : static_cast<int64_t>(roofline.kv_bytes_per_token());
  const int64_t fixed = facts.weight_bytes + info.workspace_bytes;
  facts.tokens_beside = std::max<int64_t>(0, info.available_bytes - fixed) / per_token;
  const double needed = double(fixed + info.max_model_len * per_token) / double(ranks);
  for (const int64_t size : {8, 12, 16, 24, 32, 48, 80, 96, 141, 192, 288})
    if (facts.gpu_gigabytes == 0 &&
        needed <= EngineConfig().gpu_memory_utilization * 1e9 * double(size))
      facts.gpu_gigabytes = size;
  return facts;
}

/// The plan of a format: `quantization` and `dequantize` as the options.
using FindPlan = std::function<EngineInfo(const std::string& quantization, bool dequantize)>;

/// The format that the checkpoint has, and those that options make of it.
std::vector<FormatFacts> all_formats(const ModelConfig& config, const std::string& dtype,
                                     const FindPlan& plan) {
  std::vector<FormatFacts> all;
  const auto add = [&](const std::string& name, const std::string& quantization, bool dequantize) {
    try {
      ModelConfig changed = config;
      choose_quantization(changed, quantization, dequantize);
      all.push_back(format_facts(plan(quantization, dequantize), changed, name));
    } catch (const Error& error) {  // no group of int4 divides its columns
      if (error.kind() != ErrorKind::invalid_argument) throw;
    }
  };
  if (config.quantization) {
    add(config.quantization->describe(), "auto", false);
    add(dtype + ", --dequantize", "auto", true);
  } else {
    add(dtype, "auto", false);
    for (const char* format : {"fp8", "int8", "int4"}) add(format, format, false);
  }
  return all;
}

bool lacks_memory(const Error& error) {
  return error.kind() == ErrorKind::device &&
         std::string_view(error.what()).find("not enough memory") != std::string_view::npos;
}

/// The plan of a format, with a KV cache of any size, where what was asked for lacks memory; of a
/// format that lacks it all the same what formats are compared by, with nothing available.
EngineInfo plan_alone(const InspectOptions& options, const ModelConfig& config,
                      const std::string& quantization, bool dequantize) {
  EngineConfig engine = options.engine;
  engine.quantization = quantization;
  engine.dequantize = dequantize;
  engine.num_gpu_blocks_override = engine.cpu_kvcache_bytes = engine.max_model_len = 0;
  try {
    return nanovllm::inspect(options.model, engine);
  } catch (const Error& error) {
    if (!lacks_memory(error)) throw;
  }
  EngineInfo info;
  info.dtype = info.kv_cache_dtype = name_of(compute_dtype(config, engine));
  info.max_model_len = wanted_max_model_len(config, engine);
  info.ranks.resize(static_cast<size_t>(engine.tensor_parallel_size));
  return info;
}

Json formats_json(const std::vector<FormatFacts>& formats) {
  Json json = Json::array();
  for (const FormatFacts& f : formats)
    json.push_back({{"name", f.name},
                    {"weights", f.weight_bytes},
                    {"read_per_token", f.read_bytes},
                    {"floor_ms_on_h200", 1e3 * f.floor_seconds},
                    {"gpu_gigabytes", f.gpu_gigabytes},
                    {"kv_tokens_beside", f.tokens_beside}});
  return json;
}

std::string describe_formats(const std::vector<FormatFacts>& formats) {
  Table table({"weights as", "bytes", "read per token", "floor on H200", "fits GPUs of",
               "KV tokens beside it here"});
  for (const FormatFacts& f : formats)
    table.add({f.name, binary_size(f.weight_bytes), binary_size(static_cast<int64_t>(f.read_bytes)),
               fmt::format("{:.3f} ms", 1e3 * f.floor_seconds),
               f.gpu_gigabytes > 0 ? fmt::format("{} GB", f.gpu_gigabytes) : "none",
               with_commas(f.tokens_beside)});
  return table.markdown();
}

void write(const std::string& text) {
  Output output;
  output.write(text);
  output.close();
}

/// A model that lacks memory as it is may fit in another format.
void write_other_formats(const InspectOptions& options, const ModelConfig& config) {
  const std::string dtype(name_of(compute_dtype(config, options.engine)));
  const auto formats =
      all_formats(config, dtype, [&](const std::string& quantization, bool dequantize) {
        return plan_alone(options, config, quantization, dequantize);
      });
  write(options.json ? Json({{"formats", formats_json(formats)}}).dump(2) + "\n"
                     : describe_formats(formats));
}

int run_inspect(const InspectOptions& options) {
  require_model(options.model);
  const ModelConfig config = load_model_config(options.model, config_defaults);
  EngineInfo info;
  try {
    info = nanovllm::inspect(options.model, options.engine);
  } catch (const Error& error) {
    if (lacks_memory(error)) write_other_formats(options, config);
    throw;
  }
  const auto formats = all_formats(config, info.dtype, [&](auto&&...) { return info; });
  Json json = inspection_json(info);
  json["formats"] = formats_json(formats);
  write(options.json ? json.dump(2) + "\n"
                     : describe_model(info) + "\n" + describe_formats(formats));
  for (const std::string& note : info.notes) say("note: " + one_line(note) + "\n");
  return kExitDone;
}

}  // namespace

int64_t fitting_sequences(const EngineInfo& info, int64_t length) {
  const int64_t blocks = (length + info.block_size - 1) / info.block_size;
  return std::min(info.num_blocks / blocks, info.max_num_seqs);
}

Json inspection_json(const EngineInfo& i) {
  Json json = {{"architecture", i.architecture},
               {"dtype", i.dtype},
               {"device", i.device},
               {"num_parameters", i.num_parameters},
               {"vocab_size", i.vocab_size},
               {"max_model_len", i.max_model_len},
               {"max_num_seqs", i.max_num_seqs},
               {"max_num_batched_tokens", i.max_num_batched_tokens},
               {"block_size", i.block_size}};
  json["memory"] = {{"weights", i.weight_bytes},
                    {"workspace", i.workspace_bytes},
                    {"kv_cache", i.kv_cache_bytes},
                    {"total", i.weight_bytes + i.workspace_bytes + i.kv_cache_bytes},
                    {"available", i.available_bytes}};
  json["kv_cache"] = {
      {"dtype", i.kv_cache_dtype},
      {"num_blocks", i.num_blocks},
      {"tokens", i.num_blocks * i.block_size},
      {"bytes_per_token", i.num_blocks > 0 ? i.kv_cache_bytes / (i.num_blocks * i.block_size) : 0}};
  if (!i.quantization.empty()) json["quantization"] = i.quantization;
  if (i.ranks.size() > 1)
    for (const RankInfo& rank : i.ranks)
      json["ranks"].push_back({{"device", rank.device},
                               {"weights", rank.weight_bytes},
                               {"workspace", rank.workspace_bytes},
                               {"kv_cache", rank.kv_cache_bytes},
                               {"total", total_of(rank)},
                               {"available", rank.available_bytes}});
  json["fits"] = {{"max_model_len", fitting_sequences(i, i.max_model_len)}};
  if (i.max_model_len >= 1024) json["fits"]["1024"] = fitting_sequences(i, 1024);
  return json;
}

void add_inspect(CLI::App& program, Action& action) {
  auto options = std::make_shared<InspectOptions>();
  CLI::App& command =
      add_command(program, "inspect", "Show a model's facts, its memory plan and what would fit");
  add_model(command, options->model);
  add_flag(command, "--json", options->json, "print JSON");
  add_engine_options(command, options->engine);
  set_action(command, action, [options] { return run_inspect(*options); });
}

}  // namespace nanovllm::cli
