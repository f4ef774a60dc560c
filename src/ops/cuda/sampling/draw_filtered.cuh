// A draw from a row that top_k, top_p or min_p cut, by one block: among the few tokens that can
// survive the filters, gathered from the row's best chunks and sorted; where they are not few, by
// passes over the whole row.
#pragma once

#include "ops/cuda/sampling/candidates.cuh"
#include "ops/cuda/sampling/noisy_best.cuh"

namespace nanovllm {

/// Probabilities relative to the likeliest token's become integers of this unit; below it they are
/// nothing.
constexpr float kMassUnit = 0x1p40f, kMassRange = 27.8f;
/// Chunks that are looked into for a row that top_p alone filters: few hold the mass that it wants
/// where the model is sure, more where it is not; after that all are.
constexpr int kFewChunks = 128, kManyChunks = 640;

/// A row that filters cut, in the hands of a block.
struct FilteredRow {
  ScannedRow scanned;
  const RowRule& rule;
  int likeliest;
  uint64_t total_mass;  // for top_p alone

  __device__ float top() const { return scanned.maximum / rule.temperature; }
  __device__ bool kept_by_min_p(float logit) const {
    return !(rule.min_p > 0.0f) || expf(logit / rule.temperature - top()) >= rule.min_p;
  }
  __device__ uint64_t mass(float logit) const {
    return static_cast<uint64_t>(expf(logit / rule.temperature - top()) * kMassUnit);
  }
  __device__ uint64_t wanted(uint64_t total) const {
    const double mass = ceil(static_cast<double>(rule.top_p) * static_cast<double>(total));
    return mass < 1.0 ? uint64_t{1} : static_cast<uint64_t>(mass);
  }
};

/// The sum of all tokens' masses, by tiles: a fixed part of the row per thread, then a fixed tree.
__device__ inline uint64_t total_mass(const ScannedRow& row, const float* weights,
                                      float temperature, double* warp_sums) {
  double sum = 0.0;
  for (int tile = threadIdx.x; tile * kChunksPerTile < row.chunks; tile += kRowThreads) {
    float maximum = -kInfinity;
    for (int i = 0; i < kChunksPerTile; ++i)
      maximum = fmaxf(maximum, row.chunk_max[tile * kChunksPerTile + i]);
    if (maximum == -kInfinity) continue;
    const double below = static_cast<double>(maximum) - static_cast<double>(row.maximum);
    sum += static_cast<double>(weights[tile]) * exp(below / static_cast<double>(temperature));
  }
  return static_cast<uint64_t>(block_sum(sum, warp_sums) * static_cast<double>(kMassUnit));
}

struct ChooseScratch {
  SelectScratch select;
  GatherScratch gather;
  double warp_sums[kWarp];
  uint64_t warp_best[kWarp];
};

/// Draws among the tokens of the `chunks` best chunks; 0 if those may not be all that the filters
/// leave.
__device__ inline uint64_t draw_from_candidates(const FilteredRow& row, int chunks,
                                                ChooseScratch& s) {
  const RowRule& rule = row.rule;
  if (chunks > kMaxCandidates) return 0;
  bool complete = false;  // the candidates are all tokens that are not masked
  uint32_t pivot;
  if (rule.top_k > 0 || rule.top_p < 1.0f) {
    complete = !list_top_chunks(row.scanned, chunks, s.select, s.gather);
    pivot = s.gather.pivot;
  } else {  // a little below the bar of min_p
    const float bar = row.scanned.maximum +
                      rule.temperature * (logf(rule.min_p) - 0.001f - 1e-6f * fabsf(row.top()));
    list_chunks(row.scanned, s.gather, [&](float maximum) { return maximum >= bar; });
    pivot = order_of(bar);
  }
  if (complete || pivot <= kMinusInfinityOrder) pivot = kMinusInfinityOrder + 1;
  const int found = gather_candidates(row.scanned, pivot, s.select, s.gather);
  if (found > kMaxCandidates) return 0;
  sort_candidates(s.select.candidates, found);
  int kept = rule.top_k > 0 ? min(rule.top_k, found) : found;
  if (rule.top_p < 1.0f) {
    const int needed = shortest_prefix(
        s.select, kept, [&](float logit) { return row.mass(logit); },
        [&](uint64_t sum) { return row.wanted(rule.top_k > 0 ? sum : row.total_mass); });
    if (needed > kept && !complete) return 0;
    kept = min(needed, kept);
  }
  uint64_t best = 0;
  for (int i = threadIdx.x; i < kept; i += kRowThreads) {
    const uint64_t candidate = s.select.candidates.sorted[i];
    const float logit = logit_of(candidate);
    if (!row.kept_by_min_p(logit)) continue;
    const int id = id_of(candidate);
    const Philox4 bits = noise_bits(rule.seed, rule.position, static_cast<uint32_t>(id) / 4);
    const uint64_t key = noisy_key(logit, id, bits_of(bits, id), rule.temperature);
    best = key > best ? key : best;
  }
  return block_max_key(best, s.warp_best);
}

/// The same by passes over the whole row.
__device__ inline uint64_t draw_from_row(const FilteredRow& row, ChooseScratch& s) {
  const RowRule& rule = row.rule;
  const LogitRow& logits = row.scanned.logits;
  uint64_t floor = 0;
  if (rule.top_k > 0)
    floor = weighted_cut(
        logits, row.scanned.maximum, row.scanned.maximum - row.scanned.lowest, floor, s.select,
        [](float) { return uint64_t{1}; },
        [&](uint64_t) { return static_cast<uint64_t>(rule.top_k); });
  if (rule.top_p < 1.0f)
    floor = weighted_cut(
        logits, row.scanned.maximum, kMassRange * rule.temperature, floor, s.select,
        [&](float logit) { return row.mass(logit); },
        [&](uint64_t sum) { return row.wanted(sum); });
  // The likeliest token is always kept: its score is a bar.
  Philox4 bits = noise_bits(rule.seed, rule.position, static_cast<uint32_t>(row.likeliest) / 4);
  uint64_t best =
      noisy_key(row.scanned.maximum, row.likeliest, bits_of(bits, row.likeliest), rule.temperature);
  Bar bar(rule.temperature);
  bar.raise(logit_of(best));
  uint32_t group = ~0u;
  for_each_token(logits, [&](int id, float logit) {
    const float room = bar.room(logit);
    if (Bar::hopeless(room) || rank_key(logit, id) < floor) return;
    if (const uint32_t own_group = static_cast<uint32_t>(id) / 4; own_group != group) {
      group = own_group;
      bits = noise_bits(rule.seed, rule.position, group);
    }
    if (!Bar::passes(room, bits_of(bits, id)) || !row.kept_by_min_p(logit)) return;
    const uint64_t key = noisy_key(logit, id, bits_of(bits, id), rule.temperature);
    if (key > best) best = key, bar.raise(logit_of(best));
  });
  return block_max_key(best, s.warp_best);
}

/// The key of the token drawn.
__device__ inline uint64_t draw_filtered(const FilteredRow& row, ChooseScratch& s) {
  const bool nucleus = row.rule.top_p_alone();
  uint64_t best = draw_from_candidates(row, nucleus ? kFewChunks : row.rule.top_k, s);
  if (best == 0 && nucleus) {
    __syncthreads();
    clear(s.select, s.gather);
    __syncthreads();
    best = draw_from_candidates(row, kManyChunks, s);
  }
  return best != 0 ? best : draw_from_row(row, s);
}

}  // namespace nanovllm
