// nanovllm bench gemm: a model's matrix products, each alone against its floor; and the choice of
// the GPU library's algorithms by measurement.
#include <algorithm>
#include <array>
#include <memory>
#include <random>

#include <fmt/format.h>

#include "bench/bench.h"
#include "bench/timing.h"
#include "cli/exit_code.h"
#include "io/quantised/quantize.h"
#include "models/model.h"
#include "ops/backend.h"
#include "ops/gemm_question.h"
#include "weights/weight_loader.h"

namespace nanovllm::cli {
namespace {

struct GemmOptions : BenchOptions {
  std::vector<int64_t> rows{1, 16, 64, 256, 1024, 4096, 16384};
  bool tune = false, explain = false;
};

/// A product of the model, and its weight in several layers: they are taken in turn, so that no
/// cache holds them.
struct Product {
  std::string name;
  std::vector<Weight> weights{};
  bool f32_out = false;
  bool is_gated = false;  // as a step computes it, with the activation
  const Weight& weight() const { return weights.front(); }
};

/// The numbers of a weight, and those of the rows that meet it where they are quantised, too.
std::string name_of(WeightFormat format) {
  constexpr std::array kNumbers{"f32", "bf16", "int4", "int8", "fp8"};
  const char* rows = format.numbers == WeightFormat::e4m3 ? " x fp8" : " x int8";
  return std::string(kNumbers.at(format.numbers)) + (format.quantises_rows() ? rows : "");
}

/// The model's weights, made by its own constructors, in as many layers as no cache holds.
class RandomModel {
 public:
  /// Without numbers the products have one weight each, and no memory.
  RandomModel(Backend& ops, const GemmOptions& options, ModelConfig config, DType dtype,
              bool has_numbers)
      : config_(std::move(config)), has_experts_(config_.moe) {
    config_.moe.reset();  // experts have no gemm(), and take memory
    choose_quantization(config_, options.engine.quantization, options.engine.dequantize);
    const Shard shard{0, options.engine.tensor_parallel_size};
    const auto make = [&](std::byte* storage) {
      WeightLoader loader(ops, dtype, shard, storage, config_.quantization.get());
      (void)find_architecture(config_.architecture).make(config_, {loader, {}});
      return loader;
    };
    config_.num_hidden_layers = 1;
    find_products(make(nullptr));
    if (!has_numbers) return;
    double least = kBytes;
    for (const Product& product : products) least = std::min(least, bytes_of(product.weight()));
    config_.num_hidden_layers = std::clamp<int64_t>(static_cast<int64_t>(kBytes / least), 1, 24);
    storage_ = ops.allocate(make(nullptr).bytes());
    WeightLoader loader = make(storage_.get());
    loader.load_dummy(1, {});
    ops.reserve({.dtype = dtype,
                 .rows = *std::ranges::max_element(options.rows),
                 .hidden = config_.hidden_size,
                 .quantised_columns = loader.quantised_columns()});
    find_products(loader);
  }

  std::vector<Product> products;

 private:
  /// Takes the matrices of a loader. The rows of a head are as many as there are sequences, not
  /// tokens.
  void find_products(const WeightLoader& loader) {
    products = {{"qkv"}, {"o"}, {"gate_up"}, {"down"}, {"lm_head"}};
    products[2].is_gated = products[4].f32_out = true;
    const char* head = config_.tie_word_embeddings ? "embed_tokens.weight" : "lm_head.weight";
    const std::array first_parts{"q_proj.weight", "o_proj.weight", "gate_proj.weight",
                                 "down_proj.weight", head};
    loader.for_each_matrix([&](const std::string& name, const Weight& weight) {
      for (size_t i = 0; i < products.size(); ++i) {
        std::vector<Weight>& known = products[i].weights;
        const bool is_alike = known.empty() || weight.format == known.front().format;
        if (name.ends_with(first_parts[i]) && is_alike) known.push_back(weight);
      }
    });
    if (has_experts_) products.erase(products.begin() + 2, products.begin() + 4);
  }

  static constexpr double kBytes = 300e6;
  ModelConfig config_;
  const bool has_experts_;
  Buffer storage_;
};

/// Random matrices on a device, and what holds them.
class Matrices {
 public:
  explicit Matrices(Backend& ops) : ops_(ops), noise_(kBlock) {
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    for (float& value : noise_) value = normal(generator);
  }
  Tensor plain(DType dtype, int64_t rows, int64_t columns, bool filled) {
    Tensor t(nullptr, dtype, {rows, columns}, ops_.device());
    t.data = room(t.bytes());
    if (filled) fill(t, rows, columns);
    return t;
  }

 private:
  static constexpr size_t kBlock = (size_t{1} << 20) + 7;  // rows begin at ever other places of it

  std::byte* room(size_t bytes) {
    buffers_.push_back(ops_.allocate(bytes));
    return buffers_.back().get();
  }
  void fill(Tensor t, int64_t rows, int64_t columns) {
    std::vector<Tensor> parts;
    size_t at = 0;
    for (int64_t row = 0; row < rows; ++row, at += static_cast<size_t>(columns)) {
      if (at + static_cast<size_t>(columns) > kBlock) at %= kBlock - static_cast<size_t>(columns);
      parts.emplace_back(noise_.data() + at, DType::f32,
                         std::initializer_list{int64_t{1}, columns});
    }
    ops_.load(t, parts);
  }

  Backend& ops_;
  std::vector<float> noise_;
  std::vector<Buffer> buffers_;
};

Json measure(Backend& ops, DType dtype, const Product& product, int64_t rows,
             const GemmOptions& options, const Machine& machine) {
  Matrices matrices(ops);
  const Weight& weight = product.weight();
  const int64_t n = weight.n(), k = weight.k();
  const double bytes = bytes_of(weight), flops = 2.0 * double(rows * n * k),
               most = weight.format.quantises_rows() && machine.rates.quantised_flops > 0
                          ? machine.rates.quantised_flops
                          : machine.rates.flops;
  const Tensor x = matrices.plain(dtype, rows, k, true),
               y = matrices.plain(product.f32_out ? DType::f32 : dtype, rows, n, false);
  Json row = {{"weight", product.name},
              {"format", name_of(weight.format)},
              {"n", n},
              {"k", k},
              {"rows", rows}};
  if (options.tune) {
    const GemmTuning found = ops.tune_gemm(y, x, weight);
    if (found.best > 0) {
      row["gain"] = found.before / found.best;
      row["exactness"] = found.best / found.free;
    }
  }
  const auto all = [&] {
    for (const Weight& w : product.weights) ops.gemm(y, x, w);
  };
  const double seconds = seconds_of(ops, options.repetitions, all) / double(product.weights.size());
  row["measured"] = 1e3 * seconds;
  row["microseconds"] = 1e6 * seconds;
  row["gigabytes_per_second"] = bytes / seconds * 1e-9;
  row["teraflops"] = flops / seconds * 1e-12;
  if (most > 0) row["floor"] = 1e3 * std::max(bytes / machine.rates.bytes_per_second, flops / most);
  return row;
}

/// A line for each product: the kernel that computes it in a step, and why others do not.
int explain_products(const GemmOptions& options) {
  const EngineInfo info = nanovllm::inspect(options.model, options.engine);
  const ModelConfig config = load_model_config(options.model, config_defaults);
  const auto ops = make_backend(options.engine.device, {options.engine.num_threads});
  check(ops->device().kind == Device::cuda, ErrorKind::invalid_argument,
        "--explain tells of a GPU's kernels, but this is {}: add --device cuda", ops->name());
  const DType dtype = dtype_named(info.dtype);
  const RandomModel model(*ops, options, config, dtype, false);
  for (const Product& p : model.products)
    for (const int64_t rows : options.rows)
      if (rows <= (p.f32_out ? ops->max_logits_rows() : rows))
        fmt::print("{:8} {:6} x {:5} {:6} rows: {}\n", p.name, p.weight().n(), p.weight().k(), rows,
                   explain_gemm(*ops, {p.weight().format, rows, p.weight().n(), p.weight().k(),
                                       p.is_gated, p.f32_out || dtype == DType::f32}));
  return kExitDone;
}

int bench_gemm(const GemmOptions& options) {
  require_model(options.model);
  if (options.explain) return explain_products(options);
  const EngineInfo info = nanovllm::inspect(options.model, options.engine);
  const ModelConfig config = load_model_config(options.model, config_defaults);
  const Machine machine = find_machine(options, info);
  const auto ops = make_backend(options.engine.device, {options.engine.num_threads});
  const DType dtype = dtype_named(info.dtype);
  std::vector<BenchReport::Column> columns{{"weight", "weight"},
                                           {"format", "format"},
                                           {"n", "n"},
                                           {"k", "k"},
                                           {"rows", "rows"},
                                           {"microseconds", "us", 2},
                                           {"gigabytes_per_second", "GB/s of the weight"},
                                           {"teraflops", "TFLOP/s", 1},
                                           {"share", "of the floor"}};
  if (options.tune) {
    columns.push_back({"gain", "choice before / now", 3});
    columns.push_back({"exactness", "now / best of any bits", 3});
  }
  BenchReport report("gemm", options, columns);
  Progress progress(options.quiet);
  const RandomModel model(*ops, options, config, dtype, true);
  int64_t done = 0;
  for (const Product& product : model.products)
    for (const int64_t rows : options.rows) {
      progress.loading("products", done++,
                       static_cast<int64_t>(model.products.size() * options.rows.size()));
      if (rows <= (product.f32_out ? ops->max_logits_rows() : rows))
        report.add(measure(*ops, dtype, product, rows, options, machine));
    }
  report.write(info, machine, config, 0);
  return kExitDone;
}

}  // namespace

void add_bench_gemm(CLI::App& bench, Action& action) {
  auto options = std::make_shared<GemmOptions>();
  GemmOptions& o = *options;
  CLI::App& command = add_benchmark(bench, "gemm", "The model's matrix products, one by one", o);
  add_value(command, "--rows", "N,...", "rows at once (1,16,64,256,1024,4096,16384)",
            [&o](const std::string& s) { o.rows = parse_integers(s, 1, 1 << 20); });
  add_flag(command, "--tune", o.tune,
           "on a GPU: also measure the library's algorithms, and keep the fastest of equal "
           "bits in the user's cache");
  add_flag(command, "--explain", o.explain,
           "on a GPU: instead, which kernel computes each product, and why others do not");
  set_action(command, action, [options] { return bench_gemm(*options); });
}

}  // namespace nanovllm::cli
