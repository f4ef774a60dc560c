// Prints how long GEMM and attention take at the shapes of Qwen3-0.6B, for information:
// ops_timing [gemm|attention|layers|sampling|small].
// Times are medians of graph replays; the inputs rotate through more memory than the L2 cache holds
// where that matters.
#include <cmath>

#include "gpu/decoder_rig.h"
#include "gpu/timing.h"

namespace nanovllm {
namespace {

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

struct AttentionShape {
  int seqs, query, context;
  int64_t heads = 16, kv_heads = 8, head_dim = 128;
};

/// A layer's cache. One block's worth of values in every block: the values do not matter, the
/// addresses do.
KvCache filled_cache(Rig& rig, const AttentionShape& shape, int64_t blocks, int64_t block_size) {
  const auto some = normal_values(shape.kv_heads * block_size * shape.head_dim, 1);
  const Tensor block = rig.upload(some, DType::bf16, {shape.kv_heads, block_size, shape.head_dim});
  const auto pages = [&] {
    const Tensor t = rig.empty(DType::bf16, {blocks, shape.kv_heads, block_size, shape.head_dim});
    for (int64_t b = 0; b < blocks; ++b) rig.backend.copy(t[b], block);
    return t;
  };
  const Tensor k = pages();
  return {k, pages()};
}

void time_attention(Backend& gpu, const AttentionShape& shape) {
  Rig rig(gpu);
  constexpr int64_t kBlock = 64;
  constexpr double kFastest = 4650;  // GB/s that an H200 reads
  const int seqs = shape.seqs, query = shape.query, context = shape.context;
  const int64_t blocks_each = (context + kBlock - 1) / kBlock, blocks = blocks_each * seqs;
  const double bytes = 4.0 * seqs * static_cast<double>(context) *
                       static_cast<double>(shape.kv_heads * shape.head_dim);
  // Layers enough that no one finds its keys in the L2 cache.
  const int layers = static_cast<int>(std::clamp(256e6 / bytes, 1.0, 28.0));
  std::vector<KvCache> caches;
  for (int i = 0; i < layers; ++i) caches.push_back(filled_cache(rig, shape, blocks, kBlock));
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

void time_decoder_layers(Backend& gpu) {
  DecoderShape shape{"Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072};
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
  std::string why;
  const auto gpu = open_gpu(why);
  if (!gpu) {
    std::printf("skipped: %s\n", why.c_str());
    return 0;
  }
  std::printf("%s\n", gpu->name().c_str());
  const auto wanted = [&](const char* what) { return argc < 2 || std::strstr(argv[1], what); };
  if (wanted("gemm")) time_gemm(*gpu);
  if (wanted("attention")) {
    std::printf("attention, bf16, head_dim 128 (share of 4,650 GB/s)\n");
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
      time_attention(*gpu, shape);
  }
  if (wanted("layers")) {
    std::printf("all layers of a decode step in one kernel\n");
    time_decoder_layers(*gpu);
  }
  if (wanted("sampling")) time_sampling(*gpu);
  if (wanted("small")) time_small_operations(*gpu);
}
