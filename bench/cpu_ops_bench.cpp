// Where a step's time goes on the CPU: every operation of a Qwen3-0.6B step in bf16, for one row,
// a batch and a prompt, beside what the machine can do in the same minute (bytes read per second,
// multiplications per second of the library's own GEMM).
//
//   cpu_ops_bench [repetitions] [context] [bf16 | int4 | int8 | e4m3 | w4a8 | w8a8]
//
// The last says what the layers' weights are kept as: int4 in groups of 128, the others by rows;
// w4a8 and w8a8 are int4 and int8 beside quantised activations.
// Every call counts with the best of all repetitions: other work on the machine only ever adds.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include <omp.h>

#include "core/seconds.h"
#include "ops/backend.h"

namespace {

using namespace nanovllm;

constexpr int64_t kLayers = 28, kHidden = 1024, kHeads = 16, kKvHeads = 8, kHeadDim = 128,
                  kInner = 3072;
constexpr int64_t kVocab = 151936, kBlockSize = 256;
constexpr int64_t kQkv = (kHeads + 2 * kKvHeads) * kHeadDim;

double now() { return to_seconds(std::chrono::steady_clock::now().time_since_epoch()); }

/// The model's tensors, filled with something harmless.
class Model {
 public:
  Model(Backend& ops, WeightFormat::Numbers numbers, WeightFormat::Rows rows)
      : ops_(ops), numbers_(numbers), rows_(rows) {
    for (int64_t layer = 0; layer < kLayers; ++layer)
      layers_.push_back({weight(kQkv, kHidden), weight(kHidden, kHeads * kHeadDim),
                         weight(2 * kInner, kHidden), weight(kHidden, kInner)});
    numbers_ = WeightFormat::bf16;
    rows_ = WeightFormat::Rows::plain;
    head_ = weight(kVocab, kHidden);
    norm_ = plain(DType::bf16, {kHidden});
    head_norm_ = plain(DType::bf16, {kHeadDim});
    for (Tensor t : {norm_, head_norm_})
      for (int64_t i = 0; i < t.numel(); ++i) t.ptr<bf16>()[i] = bf16(1.0f);
  }

  struct Layer {
    Weight qkv, o, gate_up, down;
  };
  const std::vector<Layer>& layers() const { return layers_; }
  Weight head() const { return head_; }
  Tensor norm() const { return norm_; }
  Tensor head_norm() const { return head_norm_; }
  size_t bytes() const { return weight_bytes_; }
  const std::vector<std::pair<const std::byte*, size_t>>& blocks() const { return blocks_; }

  Tensor plain(DType dtype, std::initializer_list<int64_t> shape) {
    Tensor t(nullptr, dtype, shape);
    buffers_.push_back(ops_.allocate(t.bytes()));
    t.data = buffers_.back().get();
    return t;
  }

 private:
  Weight weight(int64_t n, int64_t k) {
    const WeightFormat format(numbers_,
                              numbers_ == WeightFormat::int4   ? 128
                              : numbers_ == WeightFormat::bf16 ? 0
                                                               : k,
                              rows_);
    const size_t bytes = ops_.weight_bytes(format, n, k);
    buffers_.push_back(ops_.allocate(bytes));
    const Weight view = ops_.weight_view(buffers_.back().get(), format, n, k);
    std::vector<float> row(static_cast<size_t>(k));
    for (size_t i = 0; i < row.size(); ++i)
      row[i] = (i * 7 % 64 < 32 ? 1.0f : -1.0f) / static_cast<float>(k);
    Tensor part(row.data(), DType::f32, {n, k});
    part.stride[0] = 0;  // one row, n times
    const double start = now();
    if (format.is_quantised())
      ops_.load_quantised(view, quantised(format, n, k));
    else
      ops_.load(view.data, {&part, 1});
    load_seconds_ += now() - start;
    weight_bytes_ += bytes;
    blocks_.emplace_back(buffers_.back().get(), bytes);
    return view;
  }

  static QuantizedRows quantised(WeightFormat format, int64_t n, int64_t k) {
    QuantizedRows rows;
    const auto groups = static_cast<size_t>(n * format.groups(k));
    rows.scales.assign(groups, 1e-3f);
    if (format.has_zeros()) rows.zeros.assign(groups, 1);
    for (int64_t i = 0; i < n * k; ++i) rows.numbers.push_back(static_cast<int8_t>(i * 7 % 16 - 8));
    return rows;
  }

  Backend& ops_;
  WeightFormat::Numbers numbers_;
  WeightFormat::Rows rows_;
  std::vector<Buffer> buffers_;
  std::vector<Layer> layers_;
  std::vector<std::pair<const std::byte*, size_t>> blocks_;
  Weight head_;
  Tensor norm_, head_norm_;
  size_t weight_bytes_ = 0;

 public:
  double load_seconds_ = 0;
};

/// Seconds per operation of one step: of every single call the best over all repetitions, summed.
class Times {
 public:
  template <class Body>
  void measure(const std::string& name, Body&& body) {
    const double start = now();
    body();
    const double seconds = now() - start;
    if (call_ == best_.size()) best_.push_back({name, seconds});
    best_[call_].second = std::min(best_[call_].second, seconds);
    ++call_;
  }
  void end_step() { call_ = 0; }
  double total() const {
    double sum = 0;
    for (const auto& [name, seconds] : best_) sum += seconds;
    return sum;
  }
  void print() const {
    std::vector<std::pair<std::string, double>> sums;
    for (const auto& [name, seconds] : best_) {
      auto it = std::find_if(sums.begin(), sums.end(),
                             [&](const auto& sum) { return sum.first == name; });
      if (it == sums.end()) it = sums.insert(sums.end(), {name, 0.0});
      it->second += seconds;
    }
    for (const auto& [name, seconds] : sums)
      std::printf("    %-22s %9.3f ms  %5.1f %%\n", name.c_str(), seconds * 1e3,
                  100 * seconds / total());
  }

 private:
  std::vector<std::pair<std::string, double>> best_;  // by call
  size_t call_ = 0;
};

/// `sequences` sequences with `rows` new tokens each after `before` old ones.
class Step {
 public:
  Step(Model& model, Backend& ops, int64_t sequences, int64_t rows, int64_t before)
      : model_(model), ops_(ops), tokens_(sequences * rows), logits_rows_(sequences) {
    const int64_t context = before + rows, blocks = (context + kBlockSize - 1) / kBlockSize;
    for (int64_t layer = 0; layer < kLayers; ++layer)
      caches_.push_back({bf16s({sequences * blocks, kKvHeads, kBlockSize, kHeadDim}),
                         bf16s({sequences * blocks, kKvHeads, kBlockSize, kHeadDim})});
    const auto fill = [&](int64_t count, auto value) {
      const Tensor t = model.plain(DType::i32, {count});
      for (int64_t i = 0; i < count; ++i) t.ptr<int32_t>()[i] = static_cast<int32_t>(value(i));
      return t;
    };
    batch_.tokens = fill(tokens_, [](int64_t i) { return i * 997 % kVocab; });
    batch_.positions = fill(tokens_, [&](int64_t i) { return before + i % rows; });
    batch_.slot_mapping = fill(
        tokens_, [&](int64_t i) { return i / rows * blocks * kBlockSize + before + i % rows; });
    batch_.cu_seqlens_q = fill(sequences + 1, [&](int64_t i) { return i * rows; });
    batch_.context_lens = fill(sequences, [&](int64_t) { return context; });
    batch_.block_tables =
        fill(sequences * blocks, [](int64_t i) { return i; }).reshape({sequences, blocks});
    batch_.logits_rows = fill(sequences, [&](int64_t i) { return (i + 1) * rows - 1; });
    batch_.max_seqlen_q = rows;
    batch_.max_context_len = context;
    hidden_ = bf16s({tokens_, kHidden});
    residual_ = bf16s({tokens_, kHidden});
    qkv_ = bf16s({tokens_, kQkv});
    attention_ = bf16s({tokens_, kHeads * kHeadDim});
    gate_up_ = bf16s({tokens_, 2 * kInner});
    inner_ = bf16s({tokens_, kInner});
    last_ = bf16s({sequences, kHidden});
    logits_ = model.plain(DType::f32, {sequences, kVocab});
    ids_ = model.plain(DType::i32, {sequences});
    cos_sin_ = model.plain(DType::f32, {context, kHeadDim});
    for (int64_t i = 0; i < cos_sin_.numel(); ++i)
      cos_sin_.ptr<float>()[i] = i % kHeadDim < kHeadDim / 2 ? 1.0f : 0.0f;
  }

  void run(Times& times) {
    const int64_t q_end = kHeads * kHeadDim, k_end = q_end + kKvHeads * kHeadDim;
    const Tensor q = qkv_.cols(0, q_end).split(kHeadDim),
                 k = qkv_.cols(q_end, k_end).split(kHeadDim);
    const Tensor v = qkv_.cols(k_end, kQkv).split(kHeadDim);
    const float scale = 1.0f / std::sqrt(static_cast<float>(kHeadDim));
    times.measure("embedding", [&] { ops_.embedding(residual_, batch_.tokens, model_.head(), 0); });
    times.measure("norms", [&] { ops_.rms_norm(hidden_, residual_, model_.norm(), 1e-6f); });
    for (size_t i = 0; i < model_.layers().size(); ++i) {
      const Model::Layer& layer = model_.layers()[i];
      times.measure("gemm qkv", [&] { ops_.gemm(qkv_, hidden_, layer.qkv); });
      times.measure("qk_norm_rope_store", [&] {
        ops_.qk_norm_rope_store(q, k, v, model_.head_norm(), model_.head_norm(), 1e-6f, batch_,
                                cos_sin_, caches_[i]);
      });
      times.measure("attention", [&] {
        ops_.attention(attention_.split(kHeadDim), q, caches_[i], batch_, scale, 0);
      });
      times.measure("gemm o", [&] { ops_.gemm(hidden_, attention_, layer.o); });
      times.measure("norms",
                    [&] { ops_.add_rms_norm(hidden_, residual_, hidden_, model_.norm(), 1e-6f); });
      times.measure("gemm gate_up", [&] { ops_.gemm(gate_up_, hidden_, layer.gate_up); });
      times.measure("silu_and_mul", [&] { ops_.silu_and_mul(inner_, gate_up_); });
      times.measure("gemm down", [&] { ops_.gemm(hidden_, inner_, layer.down); });
      times.measure("norms",
                    [&] { ops_.add_rms_norm(hidden_, residual_, hidden_, model_.norm(), 1e-6f); });
    }
    times.measure("gather_rows", [&] { ops_.gather_rows(last_, hidden_, batch_.logits_rows); });
    times.measure("gemm lm_head", [&] { ops_.gemm(logits_, last_, model_.head()); });
    times.measure("sample (greedy)", [&] { ops_.sample(ids_, logits_, {}); });
    times.end_step();
  }

  double gemm_flops() const {
    const double per_token = 2.0 * kLayers * kHidden * (kQkv + kHeads * kHeadDim + 3 * kInner);
    return static_cast<double>(tokens_) * per_token +
           2.0 * static_cast<double>(logits_rows_ * kHidden * kVocab);
  }

 private:
  Tensor bf16s(std::initializer_list<int64_t> shape) { return model_.plain(DType::bf16, shape); }

  Model& model_;
  Backend& ops_;
  int64_t tokens_, logits_rows_;
  Batch batch_;
  std::vector<KvCache> caches_;
  Tensor hidden_, residual_, qkv_, attention_, gate_up_, inner_, last_, logits_, ids_, cos_sin_;
};

/// Reads a stretch of memory as fast as one thread can: wide loads, several streams, prefetching.
/// The result only keeps the reads alive.
#if defined(__x86_64__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
uint64_t
read_stretch(const std::byte* data, int64_t bytes) {
  using Line = uint64_t __attribute__((vector_size(64)));
  Line sums[4] = {};
  constexpr int64_t kStep = 4 * sizeof(Line), kAhead = 4096;
  for (int64_t i = 0; i + kStep <= bytes; i += kStep)
    for (int64_t j = 0; j < 4; ++j) {
      const std::byte* at = data + i + j * static_cast<int64_t>(sizeof(Line));
      __builtin_prefetch(at + kAhead);
      Line line;
      __builtin_memcpy(&line, at, sizeof line);
      sums[j] ^= line;
    }
  const Line all = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
  return all[0] ^ all[3] ^ all[7];
}

/// One pass over some memory by all threads, half of it by each of two, and so on.
uint64_t read_all(const std::byte* data, size_t bytes) {
  uint64_t sink = 0;
#pragma omp parallel reduction(^ : sink)
  {
    const int64_t lines = static_cast<int64_t>(bytes / 64), team = omp_get_num_threads();
    const int64_t begin = lines * omp_get_thread_num() / team,
                  end = lines * (omp_get_thread_num() + 1) / team;
    sink ^= read_stretch(data + begin * 64, (end - begin) * 64);
  }
  return sink;
}

/// Bytes per second that all threads together read of the weights, one matrix after another.
double read_bandwidth(const Model& model) {
  std::vector<double> best(model.blocks().size(), INFINITY);
  uint64_t sink = 0;
  for (int repetition = 0; repetition < 5; ++repetition)
    for (size_t i = 0; i < best.size(); ++i) {
      const auto& [data, bytes] = model.blocks()[i];
      const double start = now();
      sink ^= read_all(data, bytes);
      best[i] = std::min(best[i], now() - start);
    }
  if (sink == 42) std::puts("");
  return static_cast<double>(model.bytes()) / std::accumulate(best.begin(), best.end(), 0.0);
}

/// Multiplications and additions per second of the largest GEMM, 512 rows.
double gemm_rate(Model& model, Backend& ops) {
  const Tensor x = model.plain(DType::bf16, {512, kHidden}),
               y = model.plain(DType::bf16, {512, 2 * kInner});
  double best = INFINITY;
  for (int repetition = 0; repetition < 60; ++repetition) {
    const double start = now();
    ops.gemm(y, x, model.layers()[static_cast<size_t>(repetition % kLayers)].gate_up);
    best = std::min(best, now() - start);
  }
  return 2.0 * 512 * kHidden * 2 * kInner / best;
}

}  // namespace

int main(int argc, char** argv) {
  const int repetitions = argc > 1 ? std::atoi(argv[1]) : 5;
  const int64_t context = argc > 2 ? std::atoi(argv[2]) : 64;
  const std::string numbers = argc > 3 ? argv[3] : "bf16";
  const auto ops = nanovllm::make_cpu_backend({});
  const bool quantises_rows = numbers.ends_with("a8");
  Model model(*ops,
              numbers == "int4" || numbers == "w4a8"   ? WeightFormat::int4
              : numbers == "int8" || numbers == "w8a8" ? WeightFormat::int8
              : numbers == "e4m3"                      ? WeightFormat::e4m3
                                                       : WeightFormat::bf16,
              quantises_rows ? WeightFormat::Rows::token : WeightFormat::Rows::plain);
  std::printf("%s; %.2f GB of weights packed in %.2f s\n", ops->name().c_str(),
              static_cast<double>(model.bytes()) * 1e-9, model.load_seconds_);
  double one_row = 0;
  for (const auto& [sequences, rows, before] :
       {std::array<int64_t, 3>{1, 1, context - 1}, std::array<int64_t, 3>{1, 1, 1023},
        std::array<int64_t, 3>{16, 1, context - 1}, std::array<int64_t, 3>{1, 512, 0}}) {
    Step step(model, *ops, sequences, rows, before);
    Times times;
    for (int i = 0; i <= repetitions; ++i) step.run(times);
    const double bandwidth = read_bandwidth(model), rate = gemm_rate(model, *ops),
                 seconds = times.total();
    std::printf("\n%ld sequences, %ld new tokens each, context %ld: %.2f ms, %.1f tokens/s\n",
                sequences, rows, before + rows, seconds * 1e3,
                static_cast<double>(sequences * rows) / seconds);
    const double floor =
        std::max(static_cast<double>(model.bytes()) / bandwidth, step.gemm_flops() / rate);
    std::printf("  read %.1f GB/s, gemm %.0f GFLOP/s: floor %.2f ms, reached %.1f %%\n",
                bandwidth * 1e-9, rate * 1e-9, floor * 1e3, 100 * floor / seconds);
    if (one_row > 0 && sequences > 1)
      std::printf("  %.2f times the tokens/s of one sequence\n",
                  static_cast<double>(sequences) * one_row / seconds);
    if (sequences == 1 && rows == 1 && one_row == 0) one_row = seconds;
    times.print();
  }
  return 0;
}
