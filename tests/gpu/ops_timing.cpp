// Prints how long GEMM and attention take at the shapes of Qwen3-0.6B, for information:
// ops_timing [gemm|fp8|attention|layers|sampling|small].
// Times are medians of graph replays; the inputs rotate through more memory than the L2 cache holds
// where that matters.

#include "gpu/decoder_rig.h"
#include "gpu/timing.h"

namespace nanovllm {
namespace {

struct WeightShape {
  const char* name;
  int64_t n, k;
};

/// Bytes a second that the memory gives to readers, measured once on each: what a weight costs at
/// least.
double bandwidth(const Backend& gpu) {
  return gpu.name().find("H200") != std::string::npos ? 4.65e12 : 3.05e12;
}

/// A weight of which only the address matters, not the values.
Weight some_weight(Rig& rig, int64_t n, int64_t k) {
  constexpr int64_t kRows = 512;
  const Tensor w = rig.empty(DType::bf16, {n, k}),
               some = rig.upload(normal_values(kRows * k, 1, 0.03f), DType::bf16, {kRows, k});
  for (int64_t row = 0; row < n; row += kRows) {
    const int64_t rows = std::min(kRows, n - row);
    rig.backend.copy(w.rows(row, row + rows), some.rows(0, rows));
  }
  return {w, WeightFormat::bf16};
}

void time_gemm(Backend& gpu, const char* model, std::span<const WeightShape> weights) {
  std::printf("gemm, bf16, %s: microseconds (GB/s of the weight; share of the floor; TFLOP/s)\n",
              model);
  for (const auto& shape : weights) {
    Rig rig(gpu);
    const double bytes = 2.0 * static_cast<double>(shape.n * shape.k);
    const bool head = shape.n > 100'000;
    const int copies = std::max(1, static_cast<int>(400e6 / bytes));  // more than the L2 cache
    std::vector<Weight> w;
    for (int i = 0; i < copies; ++i) w.push_back(some_weight(rig, shape.n, shape.k));
    for (const int64_t m : {1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096}) {
      if (head && m > 512) continue;
      const Tensor x = rig.upload(normal_values(m * shape.k, 3), DType::bf16, {m, shape.k});
      const Tensor y = rig.empty(head ? DType::f32 : DType::bf16, {m, shape.n});
      const double us = microseconds(gpu, std::max(copies, 8), [&](int i) {
        gpu.gemm(y, x, w[static_cast<size_t>(i % copies)]);
      });
      const double flops = bytes * static_cast<double>(m);
      std::printf("  %-8s m %5ld  %8.2f us  %6.0f GB/s  %3.0f %%  %6.1f TFLOP/s\n", shape.name,
                  static_cast<long>(m), us, bytes / us * 1e-3, bytes / bandwidth(gpu) / us * 1e8,
                  flops / us * 1e-6);
    }
  }
}

/// The products of a step one after another, each waiting for the one before, as a model runs them.
void time_layers(Backend& gpu) {
  constexpr int kLayers = 28;
  constexpr int64_t kHidden = 1024, kHeads = 2048, kQkv = 4096, kInner = 3072;
  Rig rig(gpu);
  const auto weights = [&](int64_t n, int64_t k) {
    std::vector<Weight> w;
    for (int i = 0; i < kLayers; ++i) w.push_back(some_weight(rig, n, k));
    return w;
  };
  const auto qkv = weights(kQkv, kHidden), o = weights(kHidden, kHeads),
             gate_up = weights(2 * kInner, kHidden), down = weights(kHidden, kInner);
  const double bytes = 2.0 * (kQkv * kHidden + kHidden * kHeads + 3 * kInner * kHidden);
  std::printf("a layer's products and activation in a row, 0.6B (floor %.2f us)\n",
              bytes / bandwidth(gpu) * 1e6);
  for (const int64_t m : {1, 8, 16, 32, 64, 128, 256}) {
    const Tensor x = rig.upload(normal_values(m * kHidden, 2), DType::bf16, {m, kHidden}),
                 a = rig.empty(DType::bf16, {m, kQkv}), b = rig.empty(DType::bf16, {m, kInner}),
                 c = rig.empty(DType::bf16, {m, 2 * kInner});
    const double us = microseconds(gpu, kLayers, [&](int layer) {
      const auto i = static_cast<size_t>(layer);
      gpu.gemm(a, x, qkv[i]);
      gpu.gemm(x, a.cols(0, kHeads), o[i]);
      gpu.gemm_silu_and_mul(b, c, x, gate_up[i]);
      gpu.gemm(x, b, down[i]);
    });
    std::printf("  m %5ld  %8.2f us\n", static_cast<long>(m), us);
  }
}

struct AttentionShape {
  int seqs, query, context;
  int64_t heads = 16, kv_heads = 8, head_dim = 128;
};

void time_attention(Backend& gpu, const AttentionShape& shape, DType cache_dtype) {
  Rig rig(gpu);
  constexpr int64_t kBlock = 64;
  constexpr double kFastest = 4650;  // GB/s that an H200 reads
  const int seqs = shape.seqs, query = shape.query, context = shape.context;
  const int64_t blocks_each = (context + kBlock - 1) / kBlock, blocks = blocks_each * seqs;
  const double bytes = 2.0 * seqs * static_cast<double>(context * shape.kv_heads) *
                       static_cast<double>(kv_row_bytes(cache_dtype, shape.head_dim));
  // Layers enough that no one finds its keys in the L2 cache.
  const int layers = static_cast<int>(std::clamp(256e6 / bytes, 1.0, 28.0));
  std::vector<KvCache> caches;
  for (int i = 0; i < layers; ++i)
    caches.push_back(
        filled_cache(rig, shape.kv_heads, shape.head_dim, blocks, kBlock, cache_dtype));
  std::vector<int32_t> tables(static_cast<size_t>(blocks)), starts,
      contexts(static_cast<size_t>(seqs), context);
  for (int64_t b = 0; b < blocks; ++b)
    tables[static_cast<size_t>(b)] = static_cast<int32_t>(b * 7919 % blocks);
  for (int s = 0; s <= seqs; ++s) starts.push_back(s * query);
  Batch batch;
  const int64_t tokens = int64_t{seqs} * query;
  batch.tokens = rig.empty(DType::i32, {tokens});
  batch.cu_seqlens_q = rig.upload(starts, {seqs + 1});
  batch.context_lens = rig.upload(contexts, {seqs});
  batch.block_tables = rig.upload(tables, {seqs, blocks_each});
  batch.max_seqlen_q = query;
  batch.max_context_len = context;
  if (query == 1) batch.num_decodes = seqs;
  const Tensor q = rig.upload(normal_values(tokens * shape.heads * shape.head_dim, 2), DType::bf16,
                              {tokens, shape.heads, shape.head_dim}),
               out = rig.empty(DType::bf16, {tokens, shape.heads, shape.head_dim});
  const double us = microseconds(gpu, query == 1 ? 28 : 10, [&](int i) {
    if (i == 0) gpu.begin_step(batch);
    gpu.attention(out, q, caches[static_cast<size_t>(i % layers)], batch, 0.088f, 0);
  });
  const double pairs = static_cast<double>(query) * (context - query) + 0.5 * query * (query + 1.0);
  std::printf(
      "  %2ld/%ld heads  %4d x %5d queries, context %6d  %9.1f us  %6.0f GB/s of K and V "
      "(%3.0f %%)  %6.1f TFLOP/s\n",
      static_cast<long>(shape.heads), static_cast<long>(shape.kv_heads), seqs, query, context, us,
      bytes / us * 1e-3, bytes / us * 0.1 / kFastest,
      4.0 * seqs * pairs * static_cast<double>(shape.heads * shape.head_dim) / us * 1e-6);
}

void time_decoder_layers(Backend& gpu, DecoderShape shape) {
  shape.head_norms = true;
  DecoderRig decoder(gpu, shape, true);
  Rig& rig = decoder.rig;
  for (const auto& [rows, context] : {std::pair<int64_t, int32_t>{1, 128},
                                      {1, 1024},
                                      {1, 4000},
                                      {2, 1024},
                                      {4, 1024},
                                      {8, 1024}}) {
    const Batch batch =
        decoder.make_step(std::vector<int32_t>(static_cast<size_t>(rows), context), context, 1);
    const Tensor x = rig.empty(DType::bf16, {rows, shape.hidden}),
                 residual = rig.upload(normal_values(rows * shape.hidden, 2), DType::bf16,
                                       {rows, shape.hidden});
    bool served = false;
    const double together = microseconds(gpu, 10, [&](int) {
      served = gpu.decoder_layers(x, residual, decoder.stack, decoder.caches, batch);
    });
    const double apart =
        microseconds(gpu, 4, [&](int) { decoder.by_operation(x, residual, batch); });
    std::printf("  %s, %ld rows at context %4d: %7.1f us%s, one kernel per operation %7.1f us\n",
                shape.name, static_cast<long>(rows), context, together,
                served ? "" : " (not served)", apart);
  }
}

}  // namespace
}  // namespace nanovllm

int main(int argc, char** argv) {
  using namespace nanovllm;
  const auto gpu = open_gpu_or_say();
  if (!gpu) return 0;
  std::printf("%s\n", gpu->name().c_str());
  const auto wanted = [&](const char* what) { return argc < 2 || std::strstr(argv[1], what); };
  if (wanted("gemm")) {
    time_layers(*gpu);
    time_gemm(*gpu, "Qwen3-0.6B",
              std::array<WeightShape, 5>{{{"qkv", 4096, 1024},
                                          {"o", 1024, 2048},
                                          {"gate_up", 6144, 1024},
                                          {"down", 1024, 3072},
                                          {"lm_head", 151936, 1024}}});
    time_gemm(*gpu, "Qwen3-8B",
              std::array<WeightShape, 4>{{{"qkv", 6144, 4096},
                                          {"o", 4096, 4096},
                                          {"gate_up", 24576, 4096},
                                          {"down", 4096, 12288}}});
  }
  if (wanted("fp8")) time_fp8(*gpu);
  for (const DType cache : {DType::bf16, DType::e4m3}) {
    if (!wanted("attention")) break;
    std::printf("attention, bf16 over %s, head_dim 128 (share of 4,650 GB/s)\n",
                std::string(name_of(cache)).c_str());
    for (const AttentionShape& shape : {AttentionShape{1, 1, 1024},
                                        {1, 1, 16384},
                                        {4, 1, 1024},
                                        {16, 1, 1024},
                                        {64, 1, 1024},
                                        {256, 1, 1024},
                                        {256, 1, 300},
                                        {1, 1, 1024, 32},
                                        {16, 1, 1024, 32},
                                        {64, 1, 1024, 32},
                                        {256, 1, 1024, 32},
                                        {8, 1, 32768, 32},
                                        {16, 1024, 1024},
                                        {4, 4096, 4096},
                                        {1, 16384, 16384},
                                        {1, 512, 8192}})
      time_attention(*gpu, shape, cache);
  }
  if (wanted("layers")) {
    std::printf("all layers of a decode step in one kernel\n");
    time_decoder_layers(*gpu, {"Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072});
    DecoderShape fp8{"Qwen3-8B, FP8", 36, 4096, 32, 8, 128, 12288};
    for (const auto rows : {WeightFormat::Rows::group, WeightFormat::Rows::token}) {
      fp8.rows = rows;
      time_decoder_layers(*gpu, fp8);
    }
  }
  if (wanted("sampling")) time_sampling(*gpu);
  if (wanted("small")) time_small_operations(*gpu);
}
