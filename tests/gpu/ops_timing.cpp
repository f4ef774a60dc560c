// Prints how long GEMM and attention take at the shapes of Qwen3-0.6B, for information: ops_timing.
// Times are medians of graph replays; the inputs rotate through more memory than the L2 cache holds
// where that matters.
#include <algorithm>
#include <chrono>
#include <cmath>

#include "gpu/rig.h"

namespace nanovllm {
namespace {

/// Microseconds of one call of `body(i)`, from a graph of `count` of them.
template <class Body>
double microseconds(Backend& gpu, int count, Body&& body) {
  body(0);  // chooses algorithms outside the recording
  gpu.synchronize();
  const auto graph = gpu.capture([&] {
    for (int i = 0; i < count; ++i) body(i);
  });
  std::vector<double> times;
  for (int run = 0; run < 8; ++run) {
    const auto begin = std::chrono::steady_clock::now();
    graph->launch();
    gpu.synchronize();
    times.push_back(
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
            .count() /
        count);
  }
  std::sort(times.begin() + 1, times.end());  // the first run warms up
  return times[4];
}

void time_gemm(Backend& gpu) {
  const struct {
    const char* name;
    int64_t n, k;
  } weights[] = {{"qkv", 4096, 1024},
                 {"o", 1024, 2048},
                 {"gate_up", 6144, 1024},
                 {"down", 1024, 3072},
                 {"lm_head", 151936, 1024}};
  std::printf("gemm, bf16, Qwen3-0.6B: microseconds (GB/s of the weight; TFLOP/s)\n");
  for (const auto& shape : weights) {
    Rig rig(gpu);
    const int copies = shape.n > 100'000 ? 1 : 24;  // 200 MB and more of weights
    std::vector<Tensor> w;
    for (int i = 0; i < copies; ++i)
      w.push_back(rig.upload(normal_values(shape.n * shape.k, static_cast<uint32_t>(i % 2)),
                             DType::bf16, {shape.n, shape.k}));
    for (const int64_t m : {1, 8, 64, 256, 1024, 4096}) {
      if (shape.n > 100'000 && m > 512) continue;
      const Tensor x = rig.upload(normal_values(m * shape.k, 3), DType::bf16, {m, shape.k});
      const Tensor y = rig.empty(shape.n > 100'000 ? DType::f32 : DType::bf16, {m, shape.n});
      const double us =
          microseconds(gpu, 48, [&](int i) { gpu.gemm(y, x, w[static_cast<size_t>(i % copies)]); });
      const double bytes = 2.0 * static_cast<double>(shape.n * shape.k),
                   flops = bytes * static_cast<double>(m);
      std::printf("  %-8s m %5ld  %8.2f us  %6.0f GB/s  %6.1f TFLOP/s\n", shape.name,
                  static_cast<long>(m), us, bytes / us * 1e-3, flops / us * 1e-6);
    }
  }
}

void time_attention(Backend& gpu, int seqs, int query, int context) {
  Rig rig(gpu);
  constexpr int64_t kHeads = 16, kKvHeads = 8, kDim = 128, kBlock = 64;
  // One sequence's worth of values in every block: the values do not matter, the addresses do.
  const int64_t blocks_each = (context + kBlock - 1) / kBlock, blocks = blocks_each * seqs;
  const KvCache cache{rig.empty(DType::bf16, {blocks, kKvHeads, kBlock, kDim}),
                      rig.empty(DType::bf16, {blocks, kKvHeads, kBlock, kDim})};
  const auto some = normal_values(kKvHeads * kBlock * kDim, 1);
  const Tensor block = rig.upload(some, DType::bf16, {kKvHeads, kBlock, kDim});
  std::vector<int32_t> tables(static_cast<size_t>(blocks)), starts,
      contexts(static_cast<size_t>(seqs), context);
  for (int64_t b = 0; b < blocks; ++b) {
    tables[static_cast<size_t>(b)] = static_cast<int32_t>(b * 7919 % blocks);
    gpu.copy(cache.k[b], block);
    gpu.copy(cache.v[b], block);
  }
  for (int s = 0; s <= seqs; ++s) starts.push_back(s * query);
  Batch batch;
  const int64_t tokens = int64_t{seqs} * query;
  batch.tokens = rig.empty(DType::i32, {tokens});
  batch.cu_seqlens_q = rig.upload(starts, {seqs + 1});
  batch.context_lens = rig.upload(contexts, {seqs});
  batch.block_tables = rig.upload(tables, {seqs, blocks_each});
  batch.max_seqlen_q = query;
  batch.max_context_len = context;
  const Tensor q = rig.upload(normal_values(tokens * kHeads * kDim, 2), DType::bf16,
                              {tokens, kHeads, kDim}),
               out = rig.empty(DType::bf16, {tokens, kHeads, kDim});
  const double us =
      microseconds(gpu, 10, [&](int) { gpu.attention(out, q, cache, batch, 0.088f, 0); });
  const double bytes = 4.0 * seqs * static_cast<double>(context) * kKvHeads * kDim;
  const double pairs = static_cast<double>(query) * (context - query) + 0.5 * query * (query + 1.0);
  std::printf("  %4d x %5d queries, context %6d  %9.1f us  %6.0f GB/s of K and V  %6.1f TFLOP/s\n",
              seqs, query, context, us, bytes / us * 1e-3,
              4.0 * seqs * pairs * kHeads * kDim / us * 1e-6);
}

void time_sampling(Backend& gpu) {
  constexpr int64_t kVocab = 151936;
  for (const int64_t rows : {1, 256}) {
    Rig rig(gpu);
    const Tensor logits =
                     rig.upload(normal_values(rows * kVocab, 1, 3.0f), DType::f32, {rows, kVocab}),
                 ids = rig.empty(DType::i32, {rows});
    const std::vector<float> temperature(static_cast<size_t>(rows), 0.7f),
        top_p(static_cast<size_t>(rows), 0.9f), zero(static_cast<size_t>(rows), 0.0f);
    const std::vector<int32_t> top_k(static_cast<size_t>(rows), 50);
    SamplingBatch params;
    params.temperature = rig.upload(temperature, DType::f32, {rows});
    params.top_k = rig.upload(top_k, {rows});
    params.top_p = rig.upload(top_p, DType::f32, {rows});
    params.min_p = rig.upload(zero, DType::f32, {rows});
    params.seed = rig.empty(DType::i64, {rows});
    params.position = rig.empty(DType::i32, {rows});
    params.any_filter = true;
    const double filtered = microseconds(gpu, 10, [&](int) { gpu.sample(ids, logits, params); });
    params.any_filter = false;
    const double plain = microseconds(gpu, 10, [&](int) { gpu.sample(ids, logits, params); });
    params.all_greedy = true;
    const double greedy = microseconds(gpu, 10, [&](int) { gpu.sample(ids, logits, params); });
    std::printf(
        "  sample %3ld x %ld: greedy %.1f us, temperature %.1f us, top_k 50 and top_p 0.9 %.1f "
        "us\n",
        static_cast<long>(rows), static_cast<long>(kVocab), greedy, plain, filtered);
  }
}

}  // namespace
}  // namespace nanovllm

int main() {
  using namespace nanovllm;
  std::string why;
  const auto gpu = open_gpu(why);
  if (!gpu) {
    std::printf("skipped: %s\n", why.c_str());
    return 0;
  }
  std::printf("%s\n", gpu->name().c_str());
  time_gemm(*gpu);
  std::printf("attention, bf16, 16 heads, 8 KV heads, head_dim 128\n");
  for (const auto& [seqs, query, context] : {std::tuple{1, 1, 1024},
                                             {1, 1, 16384},
                                             {16, 1, 1024},
                                             {64, 1, 1024},
                                             {256, 1, 1024},
                                             {256, 1, 300},
                                             {16, 1024, 1024},
                                             {4, 4096, 4096},
                                             {1, 16384, 16384},
                                             {1, 512, 8192}})
    time_attention(*gpu, seqs, query, context);
  std::printf("sampling\n");
  time_sampling(*gpu);
}
