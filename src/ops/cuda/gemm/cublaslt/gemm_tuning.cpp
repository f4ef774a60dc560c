// Compares cuBLASLt's algorithms with gemm_in_order(), bit for bit: at start, to see which families
// add in order here, and where the choice among them is made by measurement.
#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <map>
#include <vector>

#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/core/layout.h"
#include "ops/cuda/gemm/cublaslt/gemm_check.h"

namespace nanovllm {
namespace {

/// Of few columns cuBLASLt proposes every family; of many, the kernels of large tiles. Each k is a
/// chain so long that another order of summation shows in the bits of most outputs.
constexpr GemmKey kComparedProducts[] = {{64, 128, 4096, true}, {384, 768, 2048, false}};
constexpr size_t kMostCompared = 32;  // algorithms
constexpr int kMostOfFamily = 1;      // at start, of a product: to load a kernel takes about 6 ms

constexpr int64_t kComparedRows = 128;  // the first and the last
constexpr int kRounds = 6;
constexpr double kRunSeconds = 2e-3;  // products of about this time are one run
constexpr double kHopeless = 1.3;     // times the best: not measured again

/// Something that may compute the product; `run` says whether it did.
struct Candidate {
  std::function<bool()> run;
  double seconds = std::numeric_limits<double>::infinity();  // of one product, the best run
};

/// Measures all candidates in turn, round after round: a GPU that grows hot slows them all.
void measure(cudaStream_t stream, double expected, std::vector<Candidate>& candidates) {
  const auto make_event = [] {
    cudaEvent_t event = nullptr;
    cuda_check(cudaEventCreate(&event));
    return Event(event);
  };
  const Event begin = make_event(), end = make_event();
  const int count = std::clamp(static_cast<int>(kRunSeconds / expected), 1, 100);
  double best = std::numeric_limits<double>::infinity();
  for (int round = 0; round < kRounds; ++round)
    for (Candidate& c : candidates) {
      if (round > 0 && !(c.seconds < kHopeless * best)) continue;
      if (round == 0 && !c.run()) continue;
      cuda_check(cudaEventRecord(begin.get(), stream));
      for (int i = 0; i < count; ++i) (void)c.run();
      cuda_check(cudaEventRecord(end.get(), stream));
      cuda_check(cudaEventSynchronize(end.get()));
      float milliseconds = 0;
      cuda_check(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()));
      c.seconds = std::min(c.seconds, 1e-3 * static_cast<double>(milliseconds) / count);
      best = std::min(best, c.seconds);
    }
}

}  // namespace

GemmTuning CudaBackend::tune_gemm(Tensor y, Tensor x, Weight weight) {
  if (weight.format.quantises_rows() || weight.format.in_halves) return {};
  if (weight.format.is_quantised())
    return with_unpacked(weight, [&](const Weight& plain) { return tune_gemm(y, x, plain); });
  const Tensor& w = weight.data;
  await_gemm_families();
  gemm(y, x, weight);  // checks the operands
  const GemmKey key{row_bucket(x.shape[0]), w.shape[0], x.shape[1], y.dtype == DType::f32};
  GemmTuning found;
  const GemmProblem problem{GemmEnd::store, weight.format,       y.dtype, x.shape[0], weight.n(),
                            weight.k(),     wide_rows({y, x, w})};
  if (!can_serve(GemmKernel::blas, problem, gemm_gpu())) return found;
  const int64_t rows = x.shape[0], edge = std::min(rows, kComparedRows / 2);
  const auto bytes_of = [&](const Tensor& t) {
    const Tensor first = t.rows(0, edge), last = t.rows(rows - edge, rows);
    std::vector<std::byte> bytes(first.bytes() + last.bytes());
    Tensor host = first;
    host.device = {};
    host.data = bytes.data();
    copy(host, first);
    host.data = bytes.data() + first.bytes();
    copy(host, last);
    synchronize();
    return bytes;
  };
  for (const auto& [from, to] : {std::pair{int64_t{0}, edge}, {rows - edge, rows}})
    gemm_in_order(y.rows(from, to), x.rows(from, to), w, stream());
  const auto definition = bytes_of(y);

  // First what gemm() does now, then what adds in order, then the rest.
  std::vector<Candidate> candidates{{[&] { return gemm(y, x, weight), true; }}};
  const auto ordered = gemm_algorithms_->propose(key, GemmOrder::in_order),
             others = gemm_algorithms_->propose(key, GemmOrder::any);
  for (const auto* algorithms : {&ordered, &others})
    for (const auto& algorithm : *algorithms)
      candidates.push_back({[&, a = &algorithm] {
        return gemm_algorithms_->run(y, x, w, *a, micro_batch_->blas_workspace.get(), stream());
      }});
  const double flops = 2.0 * static_cast<double>(rows * key.n * key.k);
  measure(stream(), std::max(5e-6, flops / 600e12), candidates);

  found.before = found.best = found.free = candidates.front().seconds;
  const cublasLtMatmulAlgo_t* fastest = nullptr;
  for (size_t i = 1; i < candidates.size(); ++i) {
    found.free = std::min(found.free, candidates[i].seconds);
    if (i > ordered.size() || candidates[i].seconds >= found.best) continue;
    (void)candidates[i].run();
    if (bytes_of(y) != definition) continue;
    found.best = candidates[i].seconds;
    fastest = &ordered[i - 1];
  }
  if (fastest) gemm_algorithms_->keep(key, *fastest);
  return found;
}

void CudaBackend::compare_with_in_order(
    const std::function<std::vector<cublasLtMatmulAlgo_t>(const GemmKey&)>& choose,
    const std::function<void(const cublasLtMatmulAlgo_t&, bool)>& use) {
  use_device();
  // A stream of its own: beside this, operations may be issued, and recorded.
  const Stream own = make_stream();
  const cudaStream_t stream = own.get();
  const MicroBatch& last = micro_batches_.back();
  for (const GemmKey& key : kComparedProducts) {
    auto algorithms = choose(key);
    if (algorithms.size() > kMostCompared) algorithms.resize(kMostCompared);
    if (algorithms.empty()) continue;
    std::byte* free = last.partials.get();
    const auto take = [&](DType dtype, int64_t rows, int64_t columns) {
      const Tensor t(free, dtype, {rows, columns}, device());
      free += ceil_div(static_cast<int64_t>(t.bytes()), 256) * 256;
      return t;
    };
    const DType y_type = key.f32_out ? DType::f32 : DType::bf16;
    const Tensor x = take(DType::bf16, key.rows, key.k), w = take(DType::bf16, key.n, key.k),
                 wanted = take(y_type, key.rows, key.n), y = take(y_type, key.rows, key.n);
    int* const counts = reinterpret_cast<int*>(free);
    make_operand(x, 1, stream);
    make_operand(w, 1 << 24, stream);
    gemm_in_order(wanted, x, w, stream);
    cuda_check(cudaMemsetAsync(counts, 0, kMostCompared * sizeof(int), stream));
    std::array<bool, kMostCompared> ran{};
    for (size_t i = 0; i < algorithms.size(); ++i) {
      cuda_check(cudaMemsetAsync(y.data, 0xff, y.bytes(), stream));
      ran[i] = gemm_algorithms_->run(y, x, w, algorithms[i], last.blas_workspace.get(), stream);
      count_different(y, wanted, counts + i, stream);
    }
    std::array<int, kMostCompared> different{};
    cuda_check(cudaMemcpyAsync(different.data(), counts, sizeof different, cudaMemcpyDeviceToHost,
                               stream));
    cuda_check(cudaStreamSynchronize(stream));
    for (size_t i = 0; i < algorithms.size(); ++i)
      if (ran[i]) use(algorithms[i], different[i] == 0);
  }
}

// Some 200 ms, most of them the library's first search and the loading of its kernels: memory is
// planned, weights are loaded and first steps run meanwhile.
void CudaBackend::compare_gemm_families() {
  synchronize();  // the last micro-batch's scratch is zeros by now
  families_compared_ = std::async(std::launch::async, [this] {
    GemmFamilies& families = gemm_algorithms_->families();
    compare_with_in_order(
        [&](const GemmKey& key) {
          auto algorithms = gemm_algorithms_->propose(key, GemmOrder::candidates);
          std::map<int32_t, int> of_family;
          std::erase_if(algorithms, [&](const cublasLtMatmulAlgo_t& algorithm) {
            return ++of_family[GemmAlgorithms::family_of(algorithm)] > kMostOfFamily;
          });
          return algorithms;
        },
        [&](const cublasLtMatmulAlgo_t& algorithm, bool agrees) {
          families.learn(GemmAlgorithms::family_of(algorithm), agrees);
        });
    families.keep();
  });
}

GemmComparison CudaBackend::compare_algorithms() {
  GemmComparison found;
  await_gemm_families();
  synchronize();
  compare_with_in_order(
      [&](const GemmKey& key) { return gemm_algorithms_->propose(key, GemmOrder::any); },
      [&](const cublasLtMatmulAlgo_t& algorithm, bool agrees) {
        const bool used = gemm_algorithms_->adds_in_order(algorithm);
        ++(used ? found.used : found.others);
        (used ? found.used_differ : found.others_differ) += agrees ? 0 : 1;
      });
  return found;
}

}  // namespace nanovllm
