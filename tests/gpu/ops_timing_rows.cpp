// The parts of ops_timing that go over rows: sampling, and the small operations of a decode step.

#include "gpu/timing.h"

namespace nanovllm {
namespace {

constexpr int64_t kVocab = 151936;

/// Rows of normal numbers, a few different ones over and over.
std::vector<float> many_rows(int64_t rows, int64_t width, float sigma) {
  constexpr int64_t kDifferent = 16;
  const std::vector<float> some = normal_values(std::min(rows, kDifferent) * width, 1, sigma);
  std::vector<float> all;
  all.reserve(static_cast<size_t>(rows * width));
  for (int64_t i = 0; i < rows; ++i)
    all.insert(all.end(), some.begin() + i % kDifferent * width,
               some.begin() + (i % kDifferent + 1) * width);
  return all;
}

struct Filter {
  const char* name;
  float temperature;
  int32_t top_k;
  float top_p, min_p;
};

void time_sample(Backend& gpu, const char* kind, const std::vector<float>& values, int64_t rows) {
  Rig rig(gpu);
  const Tensor logits = rig.upload(values, DType::f32, {rows, kVocab}),
               ids = rig.empty(DType::i32, {rows});
  const auto column = [&](float value) {
    return rig.upload(std::vector<float>(static_cast<size_t>(rows), value), DType::f32, {rows});
  };
  std::printf("  sample %3ld x %ld %-10s", static_cast<long>(rows), static_cast<long>(kVocab),
              kind);
  for (const Filter& f : {Filter{"greedy", 0, 0, 1, 0}, Filter{"temperature", 0.7f, 0, 1, 0},
                          Filter{"k 50 p 0.9", 0.7f, 50, 0.9f, 0}, Filter{"k 50", 0.7f, 50, 1, 0},
                          Filter{"p 0.9", 0.7f, 0, 0.9f, 0}, Filter{"min_p", 0.7f, 0, 1, 0.05f}}) {
    SamplingBatch params;
    params.temperature = column(f.temperature);
    params.top_k = rig.upload(std::vector<int32_t>(static_cast<size_t>(rows), f.top_k), {rows});
    params.top_p = column(f.top_p);
    params.min_p = column(f.min_p);
    std::vector<int64_t> seeds(static_cast<size_t>(rows));
    for (size_t i = 0; i < seeds.size(); ++i) seeds[i] = static_cast<int64_t>(i) << 33;
    params.seed = rig.upload(seeds, {rows});
    params.position = rig.empty(DType::i32, {rows});
    if (f.temperature > 0) params.features |= kSampleRandom;
    if (f.top_k > 0 || f.top_p < 1 || f.min_p > 0) params.features |= kSampleFiltered;
    const double us = microseconds(gpu, 20, [&](int) { gpu.sample(ids, logits, params); });
    std::printf("  %s %.1f", f.name, us);
  }
  for (const int64_t top : {0, 20}) {
    const Tensor best = rig.empty(DType::i32, {rows, 1 + top}),
                 logprobs = rig.empty(DType::f32, {rows, 1 + top}),
                 ranks = rig.empty(DType::i32, {rows});
    const double us =
        microseconds(gpu, 20, [&](int) { gpu.top_logprobs(best, logprobs, ranks, logits, ids); });
    std::printf("  logprobs %ld: %.1f", static_cast<long>(top), us);
  }
  std::printf(" us\n");
}

}  // namespace

void time_sampling(Backend& gpu) {
  std::printf("sampling\n");
  for (const int64_t rows : {1, 8, 64, 256}) {
    time_sample(gpu, "sigma 3", many_rows(rows, kVocab, 3.0f), rows);
    if (rows == 8) continue;
    // As language models give them: a few far above the others.
    std::vector<float> peaked = many_rows(rows, kVocab, 2.5f);
    for (size_t i = 0; i < peaked.size(); i += 6700) peaked[i] += 15.0f;
    time_sample(gpu, "peaked", peaked, rows);
    time_sample(gpu, "sigma 0.5", many_rows(rows, kVocab, 0.5f), rows);
  }
  time_sample(gpu, "all equal", std::vector<float>(static_cast<size_t>(64 * kVocab), 1.0f), 64);
}

void time_small_operations(Backend& gpu) {
  std::printf("small operations, bf16, Qwen3-0.6B: microseconds\n");
  constexpr int64_t kHidden = 1024, kInter = 3072, kHeads = 16, kKvHeads = 8, kDim = 128,
                    kBlock = 64;
  for (const int64_t t : {1, 8, 64, 256, 4096}) {
    Rig rig(gpu);
    const auto some = [&](std::initializer_list<int64_t> shape, uint32_t seed) {
      int64_t count = 1;
      for (const int64_t n : shape) count *= n;
      return rig.upload(normal_values(count, seed), DType::bf16, shape);
    };
    const Tensor x = some({t, kHidden}, 1), y = rig.empty(DType::bf16, {t, kHidden}),
                 residual = some({t, kHidden}, 2), w = some({kHidden}, 3),
                 gate_up = some({t, 2 * kInter}, 4), act = rig.empty(DType::bf16, {t, kInter}),
                 table = some({5000, kHidden}, 5), norm = some({kDim}, 6),
                 qkv = some({t, (kHeads + 2 * kKvHeads) * kDim}, 7);
    std::vector<int32_t> rows(static_cast<size_t>(t));
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int32_t>(i);
    const Tensor ids = rig.upload(rows, {t});
    const int64_t blocks = (t + kBlock - 1) / kBlock;
    const KvCache cache = filled_cache(rig, kKvHeads, kDim, blocks, kBlock),
                  e4m3 = filled_cache(rig, kKvHeads, kDim, blocks, kBlock, DType::e4m3);
    Batch batch;
    batch.positions = batch.slot_mapping = ids;
    const Tensor cos_sin = rig.upload(normal_values(t * kDim, 8), DType::f32, {t, kDim}),
                 q = qkv.cols(0, kHeads * kDim).split(kDim),
                 k = qkv.cols(kHeads * kDim, (kHeads + kKvHeads) * kDim).split(kDim),
                 v = qkv.cols((kHeads + kKvHeads) * kDim, (kHeads + 2 * kKvHeads) * kDim)
                         .split(kDim);
    std::printf("  t %4ld", static_cast<long>(t));
    const auto time = [&](const char* name, auto&& body) {
      std::printf("  %s %.2f", name, microseconds(gpu, 200, [&](int) { body(); }));
    };
    time("rms_norm", [&] { gpu.rms_norm(y, x, w, 1e-6f); });
    time("add_rms_norm", [&] { gpu.add_rms_norm(y, residual, x, w, 1e-6f); });
    time("qk_norm_rope_store",
         [&] { gpu.qk_norm_rope_store(q, k, v, norm, norm, 1e-6f, batch, cos_sin, cache); });
    time("over e4m3",
         [&] { gpu.qk_norm_rope_store(q, k, v, norm, norm, 1e-6f, batch, cos_sin, e4m3); });
    time("rope_store", [&] { gpu.rope_store(q, k, v, batch, cos_sin, cache); });
    time("silu_and_mul", [&] { gpu.silu_and_mul(act, gate_up); });
    time("embedding", [&] { gpu.embedding(y, ids, Weight{table}, 0); });
    time("gather_rows", [&] { gpu.gather_rows(y, x, ids); });
    time("feed_tokens", [&] { gpu.feed_tokens(ids, ids, ids, ids, ids); });
    std::printf("\n");
  }
}

}  // namespace nanovllm
