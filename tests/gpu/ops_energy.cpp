// Prints what the parts of a decode step of Qwen3-8B cost when each runs alone: microseconds, watts
// and millijoules a call, the clock that the GPU's power limit leaves, and how many millijoules lie
// above what rest, memory and tensor cores take of an H200. For information:
// ops_energy [--bursts WORK REST] [part of a name]... Reads the GPU's own counter, through NVML.
// With --bursts it works for about WORK milliseconds and rests for REST, in turns: times are those
// of work, watts those of both. A part that is faster so than throughout is bound by power.
#include <atomic>
#include <cstdlib>
#include <deque>
#include <thread>

#include <dlfcn.h>

#include "core/seconds.h"
#include "gpu/timing.h"

namespace nanovllm {
namespace {

using Clock = std::chrono::steady_clock;

/// NVML's counters of one GPU. The energy counter moves some ten to fifty times a second: what
/// counts are the moments at which it moved.
class Meter {
 public:
  Meter() {
    void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    check(library, "no libnvidia-ml.so.1");
    const auto get = [&](auto& f, const char* name) {
      f = reinterpret_cast<std::remove_reference_t<decltype(f)>>(dlsym(library, name));
      check(f, "NVML has no {}", name);
    };
    int (*init)() = nullptr;
    int (*handle)(unsigned, void**) = nullptr;
    get(init, "nvmlInit_v2");
    get(handle, "nvmlDeviceGetHandleByIndex_v2");
    get(energy_, "nvmlDeviceGetTotalEnergyConsumption");
    get(clock_, "nvmlDeviceGetClockInfo");
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    check(init() == 0 &&
              handle(visible ? static_cast<unsigned>(std::atoi(visible)) : 0, &device_) == 0,
          "NVML does not open");
  }
  ~Meter() { finish(); }

  void start() {
    stop_ = false;
    edges_.clear();
    clocks_ = samples_ = 0;
    thread_ = std::thread([this] {
      uint64_t last = millijoules();
      while (!stop_) {
        const uint64_t now = millijoules();
        if (now != last) {
          edges_.push_back({seconds_since(zero_), now});
        }
        last = now;
        unsigned mhz = 0;
        if (busy_ && clock_(device_, 1, &mhz) == 0) {
          clocks_ += mhz;
          ++samples_;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
  }
  void finish() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }
  double watts() const {
    if (edges_.size() < 2) return 0;
    return 1e-3 * static_cast<double>(edges_.back().millijoules - edges_.front().millijoules) /
           (edges_.back().at - edges_.front().at);
  }
  /// Whether the GPU works: clocks count only then.
  void set_busy(bool busy) { busy_ = busy; }
  double megahertz() const { return samples_ ? clocks_ / samples_ : 0; }

 private:
  struct Edge {
    double at;
    uint64_t millijoules;
  };
  uint64_t millijoules() {
    unsigned long long value = 0;
    energy_(device_, &value);
    return value;
  }

  void* device_ = nullptr;
  int (*energy_)(void*, unsigned long long*) = nullptr;
  int (*clock_)(void*, int, unsigned*) = nullptr;
  Clock::time_point zero_ = Clock::now();
  std::vector<Edge> edges_;
  double clocks_ = 0, samples_ = 0;
  std::atomic<bool> stop_ = true, busy_ = true;
  std::thread thread_;
};

/// Seconds: the power limit takes a while to bite.
constexpr double kWarm = 1.0, kMeasured = 1.5;
/// Of a burst and of the rest after it, in seconds; no rest: work throughout.
double g_work = 0, g_rest = 0;
/// Of an H200: watts at rest with memory and clocks up; picojoules a bit read from memory into
/// shared memory, all in, and a flop of wgmma on normal numbers.
constexpr double kRestWatts = 122, kBitPicojoules = 13.4, kFlopPicojoules = 0.65;
std::vector<std::string> g_wanted;

bool is_wanted(const std::string& name) {
  if (g_wanted.empty()) return true;
  for (const auto& w : g_wanted)
    if (name.find(w) != std::string::npos) return true;
  return false;
}

struct Worked {
  double seconds = 0;
  int64_t runs = 0;
};

/// Replays `graph` for so many seconds of work and rest.
Worked work_for(Backend& gpu, Meter& meter, Graph& graph, double seconds) {
  const size_t underway = g_rest > 0 ? 2 : 3;
  const auto begin = Clock::now();
  Worked all;
  while (seconds_since(begin) < seconds) {
    const double length = g_rest > 0 ? g_work : seconds;
    std::deque<std::unique_ptr<Fence>> fences;
    const auto from = Clock::now();
    meter.set_busy(true);
    for (; seconds_since(from) < length; ++all.runs) {
      graph.launch();
      fences.push_back(gpu.make_fence());
      fences.back()->record();
      if (fences.size() < underway) continue;
      fences.front()->wait();
      fences.pop_front();
    }
    gpu.synchronize();
    all.seconds += seconds_since(from);
    meter.set_busy(false);
    std::this_thread::sleep_for(std::chrono::duration<double>(g_rest));
  }
  return all;
}

/// Runs `body(i)` over and over; `bytes` are those that a call must read, `flops` those it does.
template <class Body>
void measure(Backend& gpu, Meter& meter, const std::string& name, double bytes, double flops,
             int count, Body&& body) {
  if (!is_wanted(name)) return;
  body(0);
  gpu.synchronize();
  const auto graph = gpu.capture([&] {
    for (int i = 0; i < count; ++i) body(i);
  });
  graph->wait_until_ready();
  (void)work_for(gpu, meter, *graph, kWarm);
  meter.start();
  const Worked worked = work_for(gpu, meter, *graph, kMeasured);
  meter.finish();
  const double us = worked.seconds * 1e6 / static_cast<double>(worked.runs * count),
               watts = meter.watts();
  std::printf("%-20s %8.2f us %6.1f W %5.0f MHz", name.c_str(), us, watts, meter.megahertz());
  if (g_rest == 0) {
    const double millijoules = watts * us * 1e-3,
                 least = (bytes * 8 * kBitPicojoules + flops * kFlopPicojoules) * 1e-9 +
                         kRestWatts * us * 1e-3;
    std::printf(" %8.3f mJ, %7.3f above", millijoules, millijoules - least);
  }
  std::printf(" %5.2f TB/s and %5.1f TFLOP/s\n", bytes / us * 1e-6, flops / us * 1e-6);
  std::fflush(stdout);
}

Weight some_weight(Rig& rig, int64_t n, int64_t k, uint32_t seed) {
  constexpr int64_t kRows = 512;
  const Tensor w = rig.empty(DType::bf16, {n, k}),
               some = rig.upload(normal_values(kRows * k, seed, 0.02f), DType::bf16, {kRows, k});
  for (int64_t row = 0; row < n; row += kRows) {
    const int64_t rows = std::min(kRows, n - row);
    rig.backend.copy(w.rows(row, row + rows), some.rows(0, rows));
  }
  return {w, WeightFormat::bf16};
}

constexpr int64_t kHidden = 4096, kHeads = 32, kKvHeads = 8, kDim = 128, kQkv = 6144,
                  kInner = 12288, kVocab = 151936, kBlock = 64;
constexpr int kCopies = 3;  // of each weight and cache: more than the L2 cache holds

/// Prompts and outputs of the offline workload at the first step with at most so many sequences.
std::vector<int32_t> workload_contexts(int64_t rows) {
  std::mt19937 random(0);
  std::uniform_int_distribution<int32_t> length(100, 1024);
  std::vector<int32_t> prompts(256), outputs(256), contexts;
  for (auto& p : prompts) p = length(random);
  for (auto& o : outputs) o = length(random);
  for (int32_t t = rows == 256 ? 60 : 1; t < 1024; ++t) {
    contexts.clear();
    for (size_t i = 0; i < 256; ++i)
      if (outputs[i] > t) contexts.push_back(prompts[i] + t);
    if (std::ssize(contexts) <= rows || rows == 256) break;
  }
  contexts.resize(static_cast<size_t>(rows), 500);
  return contexts;
}

struct Step {
  Batch batch;
  std::vector<KvCache> caches;
  double bytes = 0;
};

Step make_step(Rig& rig, const std::vector<int32_t>& contexts) {
  Step step;
  const auto seqs = static_cast<int64_t>(contexts.size());
  int64_t width = 0, total = 0;
  for (const int32_t c : contexts) {
    width = std::max<int64_t>(width, (c + kBlock - 1) / kBlock);
    total += c;
  }
  const int64_t blocks = seqs * width;
  step.bytes = 4.0 * static_cast<double>(total * kKvHeads * kDim);
  std::vector<int32_t> order(static_cast<size_t>(blocks));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
  std::shuffle(order.begin(), order.end(), std::mt19937(1));
  for (int i = 0; i < kCopies; ++i)
    step.caches.push_back(filled_cache(rig, kKvHeads, kDim, blocks, kBlock));
  step.batch = decode_batch(rig, contexts, order, kBlock, width * kBlock);
  return step;
}

struct Weights {
  std::vector<Weight> qkv, o, gate_up, down;
  Weight head;
  Tensor norm, head_norm, cos_sin;
};

Weights make_weights(Rig& rig) {
  Weights w;
  for (uint32_t i = 0; i < kCopies; ++i) {
    w.qkv.push_back(some_weight(rig, kQkv, kHidden, i));
    w.o.push_back(some_weight(rig, kHidden, kHeads * kDim, i));
    w.gate_up.push_back(some_weight(rig, 2 * kInner, kHidden, i));
    w.down.push_back(some_weight(rig, kHidden, kInner, i));
  }
  for (int i = 0; i < 6; ++i) {  // small ones must not stay in the cache
    w.o.push_back(some_weight(rig, kHidden, kHeads * kDim, 9));
    w.qkv.push_back(some_weight(rig, kQkv, kHidden, 9));
  }
  w.norm = rig.upload(std::vector<float>(kHidden, 1.0f), DType::bf16, {kHidden});
  w.head_norm = rig.upload(std::vector<float>(kDim, 1.0f), DType::bf16, {kDim});
  w.cos_sin = rig.upload(normal_values(4096 * kDim, 8), DType::f32, {4096, kDim});
  return w;
}

struct Activations {
  Tensor x, y, residual, qkv, heads, gate_up, gated;
};

Activations activations(Rig& rig, int64_t m) {
  const auto some = [&](int64_t n, uint32_t seed, float sigma) {
    return rig.upload(normal_values(m * n, seed, sigma), DType::bf16, {m, n});
  };
  return {some(kHidden, 1, 1),    rig.empty(DType::bf16, {m, kHidden}),
          some(kHidden, 2, 1),    some(kQkv, 3, 1),
          some(kHidden, 4, 0.1f), rig.empty(DType::bf16, {m, 2 * kInner}),
          some(kInner, 5, 0.5f)};
}

double weight_bytes(const Weight& w) { return static_cast<double>(w.bytes()); }

void measure_products(Backend& gpu, Meter& meter, const Weights& w, int64_t m) {
  Rig rig(gpu);
  const Activations a = activations(rig, m);
  const auto one = [&](const char* name, const std::vector<Weight>& weights, auto&& body) {
    measure(gpu, meter, std::string(name) + " " + std::to_string(m), weight_bytes(weights[0]),
            weight_bytes(weights[0]) * static_cast<double>(m), 300,
            [&](int i) { body(weights[static_cast<size_t>(i) % weights.size()]); });
  };
  one("qkv", w.qkv, [&](const Weight& t) { gpu.gemm(a.qkv, a.x, t); });
  one("o", w.o, [&](const Weight& t) { gpu.gemm(a.y, a.heads, t); });
  one("gate_up", w.gate_up,
      [&](const Weight& t) { gpu.gemm_silu_and_mul(a.gated, a.gate_up, a.x, t); });
  one("down", w.down, [&](const Weight& t) { gpu.gemm(a.y, a.gated, t); });
}

void measure_head(Backend& gpu, Meter& meter, const Weights& w, int64_t m) {
  Rig rig(gpu);
  const Tensor x = rig.upload(normal_values(m * kHidden, 1), DType::bf16, {m, kHidden}),
               ids = rig.empty(DType::i32, {m}), logits = rig.empty(DType::f32, {m, kVocab});
  const auto column = [&](float value) {
    return rig.upload(std::vector<float>(static_cast<size_t>(m), value), DType::f32, {m});
  };
  SamplingBatch params;
  params.temperature = column(0.6f);
  params.top_k = rig.upload(std::vector<int32_t>(static_cast<size_t>(m), 0), {m});
  params.top_p = column(1);
  params.min_p = column(0);
  std::vector<int64_t> seeds(static_cast<size_t>(m));
  for (size_t i = 0; i < seeds.size(); ++i) seeds[i] = static_cast<int64_t>(i) << 33;
  params.seed = rig.upload(seeds, {m});
  params.position = rig.empty(DType::i32, {m});
  measure(gpu, meter, "head " + std::to_string(m), weight_bytes(w.head),
          weight_bytes(w.head) * static_cast<double>(m), 40,
          [&](int) { gpu.gemm_sample(ids, logits, x, w.head, params); });
}

void measure_attention(Backend& gpu, Meter& meter, const std::string& name,
                       const std::vector<int32_t>& contexts) {
  if (!is_wanted("attention " + name)) return;
  Rig rig(gpu);
  const Step step = make_step(rig, contexts);
  const auto m = static_cast<int64_t>(contexts.size());
  const Activations a = activations(rig, m);
  measure(gpu, meter, "attention " + name, step.bytes, 0, 150, [&](int i) {
    if (i == 0) gpu.begin_step(step.batch);
    gpu.attention(a.heads.split(kDim), a.qkv.cols(0, kHidden).split(kDim),
                  step.caches[static_cast<size_t>(i) % kCopies], step.batch, 0.088f, 0);
  });
}

void measure_layers(Backend& gpu, Meter& meter, const Weights& w, int64_t m) {
  const std::string rows = " " + std::to_string(m);
  if (!is_wanted("layer" + rows) && !is_wanted("layer, no attn" + rows) &&
      !is_wanted("heads" + rows) && !is_wanted("norm" + rows))
    return;
  Rig rig(gpu);
  const Step step = make_step(rig, workload_contexts(m));
  const Activations a = activations(rig, m);
  const Tensor q = a.qkv.cols(0, kHidden).split(kDim),
               k = a.qkv.cols(kHidden, kHidden + kKvHeads * kDim).split(kDim),
               v = a.qkv.cols(kHidden + kKvHeads * kDim, kQkv).split(kDim);
  const double bytes = weight_bytes(w.qkv[0]) + weight_bytes(w.o[0]) + weight_bytes(w.gate_up[0]) +
                       weight_bytes(w.down[0]);
  const auto norm = [&] { gpu.add_rms_norm(a.y, a.residual, a.y, w.norm, 1e-6f); };
  const auto heads = [&](size_t i) {
    gpu.qk_norm_rope_store(q, k, v, w.head_norm, w.head_norm, 1e-6f, step.batch, w.cos_sin,
                           step.caches[i]);
  };
  const auto layer = [&](int n, bool attends) {
    const size_t i = static_cast<size_t>(n) % kCopies;
    if (n == 0) gpu.begin_step(step.batch);
    norm();
    gpu.gemm(a.qkv, a.y, w.qkv[i]);
    heads(i);
    if (attends) gpu.attention(a.heads.split(kDim), q, step.caches[i], step.batch, 0.088f, 0);
    gpu.gemm(a.y, a.heads, w.o[i]);
    norm();
    gpu.gemm_silu_and_mul(a.gated, a.gate_up, a.y, w.gate_up[i]);
    gpu.gemm(a.y, a.gated, w.down[i]);
  };
  const double flops = bytes * static_cast<double>(m);
  measure(gpu, meter, "layer" + rows, bytes + step.bytes, flops, 36,
          [&](int n) { layer(n, true); });
  measure(gpu, meter, "layer, no attn" + rows, bytes, flops, 36, [&](int n) { layer(n, false); });
  measure(gpu, meter, "norm" + rows, 0, 0, 600, [&](int) { norm(); });
  measure(gpu, meter, "heads" + rows, 0, 0, 600,
          [&](int n) { heads(static_cast<size_t>(n) % kCopies); });
}

}  // namespace
}  // namespace nanovllm

int main(int argc, char** argv) {
  using namespace nanovllm;
  const auto gpu = open_gpu_or_say();
  if (!gpu) return 0;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--bursts" && i + 2 < argc) {
      g_work = 1e-3 * std::atof(argv[++i]);
      g_rest = 1e-3 * std::atof(argv[++i]);
    } else {
      g_wanted.emplace_back(argv[i]);
    }
  }
  Meter meter;
  meter.start();
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  meter.finish();
  std::printf("%s, at rest %.1f W\n", gpu->name().c_str(), meter.watts());
  Rig rig(*gpu);
  Weights w = make_weights(rig);
  for (const int64_t m : {256, 160, 144, 128, 80, 48}) measure_layers(*gpu, meter, w, m);
  for (const int64_t m : {256, 144, 80})
    measure_attention(*gpu, meter, "mixed " + std::to_string(m), workload_contexts(m));
  for (const int64_t m : {256, 192, 160, 128, 96, 64}) measure_products(*gpu, meter, w, m);
  for (const int64_t m : {256, 144, 80}) {
    if (!is_wanted("head " + std::to_string(m))) continue;
    if (!w.head.defined()) w.head = some_weight(rig, kVocab, kHidden, 3);
    measure_head(*gpu, meter, w, m);
  }
}
