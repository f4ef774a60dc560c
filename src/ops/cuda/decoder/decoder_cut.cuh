// How the decoder layers' kernel cuts weights into tiles, and where activations lie.
#pragma once

#include <algorithm>
#include <climits>

#include "ops/cuda/decoder/decoder_layers.cuh"

namespace nanovllm::decoder {

/// A tile of `groups` takes about so many cycles: a chain of k16 steps, which is as long for one
/// group as for eight; the block's share of what memory brings (17 bytes a cycle), in stages, of
/// which one that is not full costs as much; and what lies around a chain.
inline int64_t cycles_of_tile(int groups, int64_t atoms) {
  constexpr int64_t kStep = 19, kStage = kStageBytes / 17, kAround = 1500;
  return atoms * 4 * kStep + ceil_div(atoms, atoms_of_stage(groups)) * kStage + kAround;
}

/// The parts of a cut that follow from the groups of its tiles, the atoms of k and the columns of
/// all.
inline MatrixCut cut_of(int64_t columns, int64_t columns_of_tile, int groups, int64_t atoms) {
  MatrixCut cut{};
  cut.columns = static_cast<int>(columns);
  cut.columns_of_tile = static_cast<int>(columns_of_tile);
  cut.tiles = static_cast<int>(ceil_div(columns, columns_of_tile));
  cut.groups = groups;
  cut.warps = kMultiplying;
  cut.atoms = static_cast<int>(atoms);
  cut.atoms_that_fit = atoms_of_stage(groups);
  cut.inverse = inverse_of(cut.atoms_that_fit);
  cut.stage_atoms = std::min(cut.atoms, cut.atoms_that_fit);
  cut.stages = (cut.atoms + cut.stage_atoms - 1) / cut.stage_atoms;
  return cut;
}

/// Whether both halves of k of a weight of n rows are multiplied at once: a tile has room for the
/// rows of both, without more tiles. Else they are in turn, which costs one row 2 to 5 % of a step
/// and saves two rows 1 % (an H200: the 8B 3.70 and 3.71 to 3.61, Llama 2 3.51 to 3.34 ms; in FP8
/// the 8B 2.45 to 2.38, the 0.6B 0.60 to 0.545).
inline bool has_room_beside(const Arguments& a, int64_t n, int blocks) {
  constexpr int64_t kFewestInTurn = 4096;
  return n < kFewestInTurn || (a.rows == 1 && n <= blocks * kMostGroups / 2 * 8);
}

/// Tiles of the size that gives the busiest block the least to do.
inline MatrixCut cut_matrix(int64_t columns, int64_t k, int halves, int blocks) {
  constexpr int64_t kRing = kMostStages * kStageBytes;
  const int64_t groups = columns / 8, atoms = k / kAtomDepth;
  // Larger than all rings, so that a product waits for memory.
  const bool streams = groups * halves * atoms * kAtomBytes > blocks * kRing;
  int64_t best = 1, best_cost = INT64_MAX;
  for (int64_t size = 1; size * halves <= kMostGroups; ++size) {
    const int64_t tiles = ceil_div(groups, size),
                  cost = ceil_div(tiles, blocks) *
                         cycles_of_tile(static_cast<int>(size) * halves, atoms);
    if (cost < best_cost || (cost == best_cost && (!streams || (halves == 1 && tiles <= blocks))))
      best = size, best_cost = cost;
  }
  MatrixCut cut = cut_of(columns, best * 8, static_cast<int>(best) * halves, atoms);
  cut.streams = streams;
  return cut;
}

/// The stages of weights that a block has on their way at once. One is enough where a layer's come
/// in the time that a layer takes at least, which is shorter for one row in halves; three, where
/// memory is what is waited for, read as fast as more. With as many as fit, the words of the
/// exchange would queue behind hundreds of kilobytes. An H100, Qwen3-0.6B in halves, context 1,000:
/// two for one take one row from 0.613 to 0.584 ms, and four rows from 0.767 to 0.81; for two rows
/// two behind the first stages of each product take 0.68 to 0.63 (pace_products()). Of int4
/// weights, whose products leave less of the ring filled, two for three take the 8B's row from 2.32
/// to 2.28.
inline int most_underway(const Arguments& a, int blocks) {
  constexpr int64_t kOfLayer = 18, kOfShortLayer = 16;
  const int64_t most = a.is_int4 ? 2 : 3;
  int64_t stages = 0;
  for (const MatrixCut& cut : a.cuts) stages += ceil_div(cut.tiles, blocks) * cut.stages;
  const bool is_short = has_halves_beside(a) && a.rows == 1;
  return static_cast<int>(std::min(ceil_div(stages, is_short ? kOfShortLayer : kOfLayer), most));
}

/// Of the place of operands: the largest.
inline int64_t operand_bytes(const Arguments& a) {
  int columns = 0;
  for (const MatrixCut& cut : a.cuts)
    columns =
        std::max(columns, cut.atoms * kAtomDepth * (cut.beside || has_halves_beside(a) ? 2 : 1));
  // A mixture's down has a row for each chosen expert.
  if (a.mixture.per_token > 0)
    columns = std::max(columns, kMostChosen * a.cuts[kDown].atoms * kAtomDepth);
  const int64_t bytes = int64_t{a.rows} * columns * 2 + bytes_of_scales(a, columns / kAtomDepth);
  // The router of E4M3 experts has an operand of its own.
  const MatrixCut& router = a.cuts[kRouter];
  return std::max(bytes, router.operand_at + int64_t{router.atoms} * kAtomRow);
}

/// Down's first columns, which gate_up's tiles before a block's last make, are gathered while
/// gate_up goes on. For that the operand of gate_up, and of qkv, lies behind them, where there is
/// room: `spare` bytes more.
inline void place_early(Arguments& a, int blocks, int64_t spare) {
  // It pays where down is several rings long.
  if (a.rows > 1 || has_halves_beside(a) || a.mixture.per_token > 0 || a.scales[kQkv] ||
      a.is_int4 || a.cuts[kDown].stages < 3 * a.stages)
    return;
  constexpr int kAtOnce = 16, kRunOfStream = 4;  // atoms: the most that a product waits for at once
  const MatrixCut& cut = a.cuts[kGateUp];
  const int made = (cut.tiles - 1) / blocks * blocks * cut.columns_of_tile;
  const int64_t of_input = int64_t{a.hidden} * 2,
                more = std::clamp<int64_t>(made * 2 + of_input - a.operand_bytes, 0, spare);
  const auto at = static_cast<int>((a.operand_bytes + more - of_input) / 128 * 128);
  MatrixCut& down = a.cuts[kDown];
  const int half = down.atoms - down.second_atoms,
            most = std::min(made, at / 2) / (kAtomDepth * kAtOnce) * kAtOnce,
            // Where a run begins: those of the second half lie behind the first.
      early = most > half ? most - (most - half) % kRunOfStream : most,
            pairs_behind = (down.atoms - early) * (kAtomDepth / 4);
  // More than gather_few() takes would go to gather_many(), which begins with the first column.
  if (early <= 0 || pairs_behind > kPairsGathered * kGathering) return;
  a.operand_bytes += more;
  down.early_atoms = early;
  a.cuts[kQkv].operand_at = a.cuts[kGateUp].operand_at = at;
}

/// Whether eight blocks of E4M3 numbers are more than three stages, of both halves of k. Then four
/// are multiplied at once, and no other code is there for more. An H200, batch 1: the 8B 2.422 and
/// 2.426 to 2.345 and 2.350 ms, the 0.6B, whose tiles are low, 0.543 and 0.547 to 0.583 and 0.582.
inline bool has_high_tiles(const Arguments& a) { return a.cuts[kDown].atoms_that_fit < 3; }

/// How long the ring should be at most. Where one stage is under way, weights are there long before
/// their operand: what comes still earlier is only in the way of the words.
inline int most_stages(const Arguments& a) { return a.most_underway > 1 ? kMostStages : 11; }

/// The parts that depend on how long the ring is. The exchange before a product is over when its
/// operand is there, so when the ring has been filled with its first stages; those behind come as
/// fast as memory can bring them; not down's, where the exchange is in the middle. And what does
/// not fit into the ring is only asked for when the first stages are free: soon, if few are waited
/// for at once.
inline void pace_products(Arguments& a) {
  constexpr int kMoreLater = 1, kCalmOfTwo = 2;
  for (MatrixCut& cut : a.cuts) {
    cut.underway = a.most_underway;
    cut.underway_later = cut.underway + kMoreLater;
    cut.calm_stages = cut.early_atoms > 0                   ? INT_MAX
                      : has_halves_beside(a) && a.rows == 2 ? kCalmOfTwo
                                                            : a.stages;
    cut.fine_atoms = std::max(0, cut.stages - a.stages) * cut.stage_atoms;
    const int run = cut.beside ? kAtomsOfPart : kRun;
    cut.held = !cut.streams && (cut.atoms - cut.second_atoms) % run == 0 && cut.atoms % run == 0 &&
               cut.atoms <= kMostHeld && cut.fine_atoms == 0 && cut.early_atoms == 0;
  }
  // Of blocks of E4M3 numbers what surrounds a run binds, not memory. An H200, Qwen3-8B at batch 1:
  // 2.540 and 2.557 to 2.404 and 2.417 ms; with gate_up's so, too, 2.499 and 2.412.
  MatrixCut& down = a.cuts[kDown];
  if (a.scale_stride[kQkv] > 0 && a.mixture.per_token == 0 && down.streams)
    down.streams = false, down.fine_atoms = 0;
}

/// Whether a step is of one row of one rank, without biases, of which a thread has eight elements
/// in a norm. There are kernels of such steps alone: an exchange waits for instructions, and these
/// have two thirds of the others'. An H200, Qwen3-8B: FP8 from 2.33 to 2.18 ms, int8 from 2.55 to
/// 2.36, int4 from 1.91 to 1.85, bf16 from 3.66 to 3.65.
inline bool has_single_row(const Arguments& a) {
  return a.rows == 1 && a.world == 1 && a.hidden <= 8 * a.norm_threads &&
         std::ranges::none_of(a.cuts, [](const MatrixCut& cut) { return cut.bias != nullptr; });
}

/// Whether a step is the usual one of a small model, for which there is a kernel of its own: a
/// single row, each block with one tile of a product at most, all of whose stages fit into the
/// ring.
inline bool is_lean(const Arguments& a, int blocks) {
  const auto fits = [&](const MatrixCut& cut) {
    return cut.held && cut.second_atoms == 0 && cut.tiles <= blocks &&
           (cut.beside ? 2 : 1) * cut.atoms * (kAtomDepth / 4) <= kPairsGathered * kGathering;
  };
  return has_single_row(a) && has_halves_beside(a) && a.mixture.per_token == 0 && !a.scales[kQkv] &&
         !a.is_int4 && fits(a.cuts[kQkv]) && fits(a.cuts[kOut]) && fits(a.cuts[kGateUp]) &&
         fits(a.cuts[kDown]);
}

/// Where each activation lies; the words that they take.
inline int64_t place_words(Arguments& a, int64_t head_dim, int64_t max_context) {
  a.max_chunks = static_cast<int>(ceil_div(std::max<int64_t>(max_context, 1), kChunk));
  int64_t used = 0;
  const auto take = [&](int64_t words) {
    const int64_t at = used;
    used += ceil_div(words, 16) * 16;
    return at;
  };
  const int64_t slots = int64_t{a.rows} * a.heads * a.max_chunks;
  for (MatrixCut& cut : a.cuts) cut.words = take(int64_t{a.rows} * cut.columns / 2);
  a.mixture.logits_at = take(a.mixture.experts);
  a.mixture.foreseen_at = take(a.mixture.experts);
  a.heads_at = take(a.rows * a.heads * head_dim / 2);
  if (used > kReplicaWords) return INT64_MAX;
  used = kReplicas * kReplicaWords;
  a.partial_at = take(slots * head_dim);
  a.partial_sum_at = take(slots * 2);
  return used;
}

/// Whether separate operations take less time, by what each block receives in a layer, the operands
/// of four products, and by what its units of attention cost in such elements. Measured on H200s,
/// 22 shapes of 2 to 8 rows of 1,000 tokens (docs/performance/tried.md): where halves are not
/// beside each other chains are longer; int4's separate operations are cheap; over E4M3 a second
/// unit costs as much as they do.
inline bool are_faster_apart(const Arguments& a, int64_t head_dim, int blocks) {
  constexpr int64_t kMostBeside = 54'000, kMostOfOthers = 46'000, kMostOfInt4 = 34'000,
                    kMostOfFewInt4 = 110'000, kOfUnit = 4'000;
  if (a.rows == 1) return false;
  const int64_t units = int64_t{a.rows} * a.kv_heads * a.max_chunks,
                of_row = (a.world > 1 ? 3 : 2) * int64_t{a.hidden} + a.heads * head_dim +
                         a.cuts[kGateUp].columns,
                received = a.rows * of_row + (a.rows > 2 ? kOfUnit * units / blocks : 0),
                most = a.is_int4              ? (a.rows > 3 ? kMostOfInt4 : kMostOfFewInt4)
                       : has_halves_beside(a) ? kMostBeside
                                              : kMostOfOthers;
  return received > most || (a.has_e4m3_cache && a.rows > 2 && units > blocks);
}

/// Of a tile of gate, and as many of up: where they fit, E4M3 weights have the higher tiles, whose
/// two rounds are shorter than three, while plain ones wait for memory.
constexpr int kGateUpColumns = 16, kFp8GateUpColumns = 24;
constexpr int kExpertsUnderway = 3;                     // stages of weights on their way at once
constexpr int kExpertColumns = 16, kExpertsAtOnce = 4;  // of a tile of down
constexpr int kExpertAtoms = 2;                         // of each of its experts, in a stage
constexpr int kExpertBytes = kExpertColumns / 8 * kExpertAtoms * kAtomBytes;
static_assert(kExpertsAtOnce * kExpertBytes == kStageBytes);

/// Gate_up of all chosen experts of n outputs, one expert after the other.
inline MatrixCut cut_gate_up(int64_t per_token, int64_t n, int64_t k, bool fp8) {
  const int columns = fp8 && n % kFp8GateUpColumns == 0 ? kFp8GateUpColumns : kGateUpColumns;
  MatrixCut cut = cut_of(per_token * n, columns, 2 * columns / 8, k / kAtomDepth);
  cut.streams = true;
  return cut;
}

/// Down of all chosen experts.
inline MatrixCut cut_down(int64_t per_token, int64_t columns, int64_t k) {
  MatrixCut cut{};
  cut.columns = static_cast<int>(columns);
  cut.columns_of_tile = kExpertColumns;
  cut.tiles = cut.columns / kExpertColumns;
  cut.atoms = static_cast<int>(k / kAtomDepth);
  cut.stages = static_cast<int>(per_token / kExpertsAtOnce) * cut.atoms / kExpertAtoms;
  return cut;
}

}  // namespace nanovllm::decoder
