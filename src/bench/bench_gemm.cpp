// nanovllm bench gemm: a model's matrix products, each alone against its floor; and the choice of
// the GPU library's algorithms by measurement.
#include <algorithm>
#include <memory>
#include <random>

#include <fmt/format.h>

#include "bench/bench.h"
#include "bench/timing.h"
#include "cli/exit_code.h"
#include "models/model.h"
#include "ops/backend.h"
#include "ops/gemm_question.h"

namespace nanovllm::cli {
namespace {

struct GemmOptions : BenchOptions {
  std::vector<int64_t> rows{1, 16, 64, 256, 1024, 4096, 16384};
  bool tune = false, explain = false;
};

struct WeightShape {
  const char* name;
  int64_t n, k;
  bool f32_out = false;
  bool is_gated = false;  // as a step computes it, with the activation
  bool in_halves = false;
  WeightFormat format(DType dtype) const {
    WeightFormat format = plain_format(dtype);
    format.in_halves = in_halves;
    return format;
  }
};

/// One rank's weights, of a dense layer. The rows of a head are as many as there are sequences, not
/// tokens.
std::vector<WeightShape> weights_of(const ModelConfig& c, int64_t ranks) {
  const int64_t q = c.num_attention_heads / ranks * c.head_dim,
                kv = std::max<int64_t>(1, c.num_key_value_heads / ranks) * c.head_dim,
                inner = c.intermediate_size / ranks;
  const bool in_halves = ranks == 1 && c.is_in_halves();
  return {{"qkv", q + 2 * kv, c.hidden_size},
          {"o", c.hidden_size, q, false, false, in_halves},
          {"gate_up", 2 * inner, c.hidden_size, false, true},
          {"down", c.hidden_size, inner, false, false, in_halves},
          {"lm_head", c.vocab_size / ranks, c.hidden_size, true}};
}

/// Random matrices on a device, and what holds them.
class Matrices {
 public:
  Matrices(Backend& ops, DType dtype) : ops_(ops), dtype_(dtype), noise_(kBlock) {
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    for (float& value : noise_) value = normal(generator);
  }
  Weight weight(const WeightShape& shape) {
    const WeightFormat format = shape.format(dtype_);
    std::byte* const data = room(ops_.weight_bytes(format, shape.n, shape.k));
    const Weight w = ops_.weight_view(data, format, shape.n, shape.k);
    fill(w.data, shape.n, shape.k);
    return w;
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
  DType dtype_;
  std::vector<float> noise_;
  std::vector<Buffer> buffers_;
};

double bytes_of(const WeightShape& shape, DType dtype) {
  return double(shape.n * shape.k) * double(size_of(dtype));
}

/// Copies of a weight that take more than the caches hold.
std::vector<Weight> copies_of(const WeightShape& shape, DType dtype, Matrices& matrices) {
  constexpr double kBytes = 300e6;
  const int64_t copies =
      std::clamp<int64_t>(static_cast<int64_t>(kBytes / bytes_of(shape, dtype)), 1, 24);
  std::vector<Weight> weights;
  for (int64_t i = 0; i < copies; ++i) weights.push_back(matrices.weight(shape));
  return weights;
}

Json measure(Backend& ops, DType dtype, const WeightShape& shape,
             const std::vector<Weight>& weights, int64_t rows, const GemmOptions& options,
             const Machine& machine) {
  Matrices matrices(ops, dtype);
  const double bytes = bytes_of(shape, dtype), flops = 2.0 * double(rows * shape.n * shape.k);
  const Tensor x = matrices.plain(dtype, rows, shape.k, true),
               y = matrices.plain(shape.f32_out ? DType::f32 : dtype, rows, shape.n, false);
  Json row = {{"weight", shape.name}, {"n", shape.n}, {"k", shape.k}, {"rows", rows}};
  if (options.tune) {
    const GemmTuning found = ops.tune_gemm(y, x, weights.front());
    if (found.best > 0) {
      row["gain"] = found.before / found.best;
      row["exactness"] = found.best / found.free;
    }
  }
  // The weights are taken in turn, so that no cache holds them.
  const auto all = [&] {
    for (const Weight& w : weights) ops.gemm(y, x, w);
  };
  const double seconds = seconds_of(ops, options.repetitions, all) / double(weights.size());
  row["measured"] = 1e3 * seconds;
  row["microseconds"] = 1e6 * seconds;
  row["gigabytes_per_second"] = bytes / seconds * 1e-9;
  row["teraflops"] = flops / seconds * 1e-12;
  if (machine.rates.flops > 0)
    row["floor"] =
        1e3 * std::max(bytes / machine.rates.bytes_per_second, flops / machine.rates.flops);
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
  for (const WeightShape& shape : weights_of(config, options.engine.tensor_parallel_size))
    for (const int64_t rows : options.rows)
      if (rows <= (shape.f32_out ? ops->max_logits_rows() : rows))
        fmt::print("{:8} {:6} x {:5} {:6} rows: {}\n", shape.name, shape.n, shape.k, rows,
                   explain_gemm(*ops, {shape.format(dtype), rows, shape.n, shape.k, shape.is_gated,
                                       shape.f32_out || dtype == DType::f32}));
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
  const auto shapes = weights_of(config, options.engine.tensor_parallel_size);
  int64_t done = 0;
  for (const WeightShape& shape : shapes) {
    Matrices matrices(*ops, dtype);
    const std::vector<Weight> weights = copies_of(shape, dtype, matrices);
    for (const int64_t rows : options.rows) {
      progress.loading("products", done++,
                       static_cast<int64_t>(shapes.size() * options.rows.size()));
      if (rows <= (shape.f32_out ? ops->max_logits_rows() : rows))
        report.add(measure(*ops, dtype, shape, weights, rows, options, machine));
    }
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
