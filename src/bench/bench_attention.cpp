// nanovllm bench attention: the attention kernels alone, over the shapes of batches and models.
//
// Beside each figure stands the same result got naively, in the two ways that paging and tiling
// replace: decode from pages that are first copied together, prefill of each row for itself.
#include <algorithm>
#include <memory>

#include <fmt/format.h>

#include "bench/attention_rig.h"
#include "bench/bench.h"
#include "bench/timing.h"
#include "cli/exit_code.h"
#include "core/check.h"
#include "weights/kv_cache.h"

namespace nanovllm::cli {
namespace {

struct Heads {
  int64_t query, kv;
};

struct AttentionOptions : BenchOptions {
  // Empty: the defaults of the device.
  std::vector<int64_t> batch_sizes, contexts, prompts;
  std::vector<int64_t> head_dims{128};
  std::vector<Heads> heads{{16, 8}};
  int64_t prompt_tokens = 0;
  int64_t block_size = 64;
};

// "16x8,32x8": query heads x KV heads.
std::vector<Heads> parse_heads(const std::string& text) {
  std::vector<Heads> list;
  for (const std::string& item : split(text, ',')) {
    const size_t cross = item.find('x');
    check(cross != std::string::npos, ErrorKind::invalid_argument,
          "must be QUERYxKV heads such as 16x8, got {}", quote(item));
    const Heads heads{parse_integer(item.substr(0, cross), 1, 4096),
                      parse_integer(item.substr(cross + 1), 1, 4096)};
    check(heads.query % heads.kv == 0, ErrorKind::invalid_argument,
          "{} query heads are no multiple of {} KV heads", heads.query, heads.kv);
    list.push_back(heads);
  }
  return list;
}

class AttentionBench {
 public:
  explicit AttentionBench(const AttentionOptions& options)
      : options_(options),
        device_(make_backend(options.engine.device, {options.engine.num_threads})) {
    const bool is_cpu = device_->device().kind == Device::cpu;
    EngineInfo info;
    info.device = device_->name();
    info.dtype = options.engine.dtype == "f32" ? "f32" : "bf16";
    machine_ = find_machine(options, info);
    const auto fill = [](std::vector<int64_t>& values, std::vector<int64_t> usual) {
      if (values.empty()) values = std::move(usual);
    };
    using List = std::vector<int64_t>;
    fill(options_.batch_sizes, is_cpu ? List{1, 16} : List{1, 16, 64, 256});
    fill(options_.contexts, is_cpu ? List{256, 1024} : List{1024, 4096});
    fill(options_.prompts, is_cpu ? List{128, 512} : List{1024, 4096, 16384});
    if (options_.prompt_tokens == 0) options_.prompt_tokens = is_cpu ? 512 : 16384;
  }

  int run() {
    BenchReport report("attention", options_,
                       {{"test", "test"},
                        {"heads", "heads"},
                        {"head_dim", "head size"},
                        {"cache", "keys and values"},
                        {"batch_size", "batch"},
                        {"context", "context"},
                        {"measured", "us", 1},
                        {"tb_per_second", "TB/s", 3},
                        {"tflops", "TFLOP/s", 2},
                        {"floor", "floor, us", 1},
                        {"share", "of the floor"},
                        {"naive", "naive, us", 1},
                        {"gain", "x faster", 1}});
    for (const Heads& heads : options_.heads)
      for (const int64_t head_dim : options_.head_dims) {
        for (const int64_t context : options_.contexts)
          for (const int64_t batch : options_.batch_sizes)
            report.add(measure(shape(heads, head_dim, batch, 1, context)));
        for (const int64_t prompt : options_.prompts)
          report.add(
              measure(shape(heads, head_dim, std::max<int64_t>(1, options_.prompt_tokens / prompt),
                            prompt, prompt)));
      }
    report.note(
        "naive: a decode step (tg) that first copies the pages together; a prompt (pp) whose rows "
        "are computed one by one.");
    report.write("attention alone, one layer", device_->name(), machine_);
    return kExitDone;
  }

 private:
  DType dtype() const { return dtype_named(options_.engine.dtype); }
  AttentionShape shape(const Heads& heads, int64_t head_dim, int64_t seqs, int64_t queries,
                       int64_t context) const {
    return {
        .seqs = seqs,
        .queries = queries,
        .context = context,
        .heads = heads.query,
        .kv_heads = heads.kv,
        .head_dim = head_dim,
        .block_size = options_.block_size,
        .dtype = dtype(),
        .cache_dtype = kv_cache_dtype(*device_, nullptr, options_.engine.kv_cache_dtype, dtype())};
  }

  Json measure(const AttentionShape& shape) {
    // Layers enough that their keys fit no cache, as in a model.
    constexpr double kBeyondCaches = 256e6;
    const bool is_decode = shape.queries == 1;
    const int64_t calls = is_decode ? 28 : 4;
    const auto layers = static_cast<int64_t>(
        std::clamp(is_decode ? kBeyondCaches / shape.cache_bytes() : 1.0, 1.0, double(calls)));
    AttentionRig rig(*device_, shape, layers, calls);
    const auto time = [&](void (AttentionRig::*way)()) {
      return seconds_of(*device_, options_.repetitions, [&] { (rig.*way)(); }) / double(calls);
    };
    const double seconds = time(&AttentionRig::paged);
    const double naive = time(is_decode ? &AttentionRig::gathered : &AttentionRig::row_by_row);
    Json row = {{"test", fmt::format("{}{}", is_decode ? "tg at " : "pp", shape.context)},
                {"heads", fmt::format("{}x{}", shape.heads, shape.kv_heads)},
                {"head_dim", shape.head_dim},
                {"cache", name_of(shape.cache_dtype)},
                {"batch_size", shape.seqs},
                {"context", shape.context},
                {"measured", 1e6 * seconds},
                {"tb_per_second", shape.cache_bytes() / seconds / 1e12},
                {"tflops", shape.flops() / seconds / 1e12},
                {"naive", 1e6 * naive},
                {"gain", naive / seconds}};
    const Rates& rates = machine_.rates;
    if (rates.bytes_per_second > 0 && rates.flops > 0)
      row["floor"] =
          1e6 * std::max(shape.cache_bytes() / rates.bytes_per_second, shape.flops() / rates.flops);
    return row;
  }

  AttentionOptions options_;
  std::unique_ptr<Backend> device_;
  Machine machine_;
};

}  // namespace

void add_bench_attention(CLI::App& bench, Action& action) {
  auto options = std::make_shared<AttentionOptions>();
  AttentionOptions& o = *options;
  CLI::App& command = add_command(bench, "attention", "The attention kernels alone");
  add_bench_options(command, o);
  add_value(command, "--device", "DEVICE", "auto, cpu, cuda or cuda:N (auto)",
            [&o](const std::string& s) { o.engine.device = s; });
  add_value(command, "--threads,-t", "N", "CPU threads", [&o](const std::string& s) {
    o.engine.num_threads = static_cast<int>(parse_integer(s, 1, 4096));
  });
  add_value(command, "--dtype", "TYPE", "bf16 or f32 (bf16)", [&o](const std::string& s) {
    check(s == "bf16" || s == "f32", ErrorKind::invalid_argument, "must be bf16 or f32, got {}",
          quote(s));
    o.engine.dtype = s;
  });
  add_value(command, "--kv-cache-dtype", "TYPE", "auto, bfloat16 or fp8 (auto: that of --dtype)",
            [&o](const std::string& s) { o.engine.kv_cache_dtype = s; });
  add_value(command, "--batch-size", "N,...", "sequences of a decode step (1,16,64,256)",
            [&o](const std::string& s) { o.batch_sizes = parse_integers(s, 1, 65536); });
  add_value(command, "--context", "N,...", "their keys (1024,4096)",
            [&o](const std::string& s) { o.contexts = parse_integers(s, 1, 1 << 20); });
  add_value(command, "--input-len", "N,...", "tokens of a prompt (1024,4096,16384)",
            [&o](const std::string& s) { o.prompts = parse_integers(s, 1, 1 << 20); });
  add_value(command, "--prompt-tokens", "N", "tokens of all prompts of a row (16384)",
            [&o](const std::string& s) { o.prompt_tokens = parse_integer(s, 1, 1 << 24); });
  add_value(command, "--heads", "QxKV,...", "query and KV heads (16x8)",
            [&o](const std::string& s) { o.heads = parse_heads(s); });
  add_value(command, "--head-dim", "N,...", "head sizes (128)",
            [&o](const std::string& s) { o.head_dims = parse_integers(s, 1, 1024); });
  add_value(command, "--block-size", "N", "tokens of a page (64)",
            [&o](const std::string& s) { o.block_size = parse_integer(s, 8, 256); });
  set_action(command, action, [options] { return AttentionBench(*options).run(); });
}

}  // namespace nanovllm::cli
