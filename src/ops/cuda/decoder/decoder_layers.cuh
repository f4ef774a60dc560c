// Shared by the parts of the decoder layers' kernel: its arguments, how activations travel between
// blocks, and the ring through which weights and keys stream into shared memory.
//
// Exchange. A word of 8 bytes carries 4 bytes of data and a 4-byte epoch, written and read in one
// piece: who finds the epoch of this layer has the data, and neither fences nor counters are
// needed. Epochs only grow; buffers are never cleared (but see renew()).
#pragma once

#include "ops/cuda/attention/attention.cuh"
#include "ops/cuda/comm/peer_exchange.cuh"
#include "ops/cuda/decoder/decoder_ring.cuh"
#include "ops/cuda/decoder/decoder_words.cuh"

namespace nanovllm::decoder {

constexpr int kThreads = 512;  // a warp more brings weights, keys and values
constexpr int kLaunched = kThreads + kWarp;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMultiplying = 4;                              // warps, the first ones: a warpgroup
constexpr int kGathering = kThreads - kMultiplying * kWarp;  // threads of the other warps
constexpr int kNormThreads = 4 * kWarp,
              kNormParts = kThreads / kNormThreads;  // of normalise_apart()
constexpr int kMaxRows = 8;                          // of a step
constexpr int kMaxGroup = 8;                         // query heads per KV head
constexpr int kChunkTiles = kChunk / kTileKeys;
constexpr int kMostStages = 16;
constexpr int kFewestStages = 2 * kChunkTiles;  // keys and values of a chunk are there at once
constexpr int kAtomBytes = 1024;                // 8 rows of 64 elements
constexpr int kAtomDepth = 64;
constexpr int kAtomRow = 2 * kAtomDepth;  // bytes of one of its rows
constexpr int kMostGroups = 8;            // of a tile: the 64 rows of wgmma's A
/// Of a tile of so many groups, in a stage.
constexpr int atoms_of_stage(int groups) { return kStageBytes / kAtomBytes / groups; }
/// The means to find atom / atoms_of_stage(): a multiplication and a shift by kInverseBits, for
/// the few atoms that are ever counted from a stage's start.
constexpr int kInverseBits = 16;
constexpr int inverse_of(int divisor) { return ((1 << kInverseBits) + divisor - 1) / divisor; }
/// Copies of what every block reads, each for some blocks: the L2 cache serves one line slowly.
constexpr int kReplicas = 4;
/// From one to the next, of all but partial results: a constant costs no instructions. More than
/// the rows that fit into shared memory can have, and no power of two, which would put a word's
/// copies side by side in the L2 cache.
constexpr int64_t kReplicaWords = 62480;
constexpr int kRun = 16;       // atoms of a product's straight piece of code
constexpr int kMostHeld = 64;  // atoms of multiply_held()
static_assert(kMostHeld == 2 * kWarp);
/// The lean kernel's o and down wait for parts of their operand: so many atoms of both halves.
constexpr int kAtomsOfPart = kRun / 2;
constexpr int kPairsOfPart = 2 * kAtomsOfPart * kAtomDepth / 4;  // pairs of words
constexpr int kPairsGathered = 3;                                // that a thread asks for at once
constexpr int kMaxLayers = 256;
constexpr int kMostExperts = 128, kMostChosen = 8;
/// Epochs have 32 bits: some 22 hours of Qwen3-0.6B at batch 1.
constexpr uint32_t kLastEpoch = 0xf0000000u;
constexpr size_t kEpochBytes = 4096;  // at the start of the exchange buffer: one of each block

/// The products of a layer, in order. A mixture's router comes before gate_up.
enum Product { kQkv, kOut, kGateUp, kDown, kProducts, kRouter = kProducts };

/// How one weight matrix is cut: a tile is some groups of 8 rows (of both halves, if gated), a
/// stage of the ring holds some atoms (64 columns) of a tile; block b has the tiles b, b + grid..
struct MatrixCut {
  int tiles, groups, atoms, stage_atoms;  // groups of a tile, both halves counted
  bool streams;                  // memory is waited for: a product waits for little at once
  bool held;                     // a product waits for a whole tile at once: multiply_held()
  int atoms_that_fit, inverse;   // into a stage, and inverse_of() them
  int columns_of_tile, stages;   // outputs (of one half); stages that a tile takes
  int columns;                   // outputs (of one half)
  int warps;                     // that multiply: kMultiplying, or more of packed weights
  const __nv_bfloat16* bias;     // of the first layer; may be null
  int64_t words;                 // where the outputs lie in the exchange buffer
  int operand_at;                // in shared memory, bytes behind the place of all operands
  int early_atoms;               // of down's operand: they are gathered while gate_up goes on
  int second_atoms;              // that have a chain of their own: of a weight in halves
  bool beside;                   // it is in halves that are multiplied at once
  int fine_atoms;                // so many first ones are waited for in small runs
  int calm_stages;               // of a block: those that come while the operand is exchanged
  int underway, underway_later;  // stages on their way at once: of calm_stages, of the others
};

/// A mixture of experts in place of the MLP (decoder_mixture.cuh). Its maps' last axis names an
/// expert of a layer: chosen x steps[0] + layer x steps[1].
struct Mixture {
  int experts, per_token;  // 0: there is none
  bool normalises;
  int tiles;  // of gate_up, in one expert
  int gate_up_steps[2], down_steps[2];
  int64_t gate_up_scales, down_scales;  // of E4M3 weights, from an expert's to the next one's
  int64_t logits_at;                    // in the exchange buffer
  // Of the guess (decoder_foresight.cuh): the first layer's router; where its logits lie.
  const __nv_bfloat16* router;
  int64_t foreseen_at;
};

struct Arguments {
  CUtensorMap maps[kProducts + 1], k, v;
  MatrixCut cuts[kProducts + 1];
  Mixture mixture;
  // Of the first layer; the next one's lie layer_stride elements further.
  const __nv_bfloat16* norms[2];  // before qkv, before gate_up
  const __nv_bfloat16 *q_norm, *k_norm;
  int64_t layer_stride;
  int layer_atoms;                   // the same in rows of an atom, of the weights' maps
  __nv_bfloat16 *k_cache, *v_cache;  // or numbers of E4M3
  int64_t k_layer_stride, v_layer_stride;
  __nv_bfloat16 *x, *residual;
  int64_t x_stride, residual_stride;
  const int *positions, *slots, *context_lens, *block_tables;
  int64_t table_stride;
  const float* cos_sin;
  int64_t cos_sin_stride;
  // The exchange buffer. Activations are [row][pair of elements].
  uint64_t* words;
  int64_t total_words;                 // of the buffer, used or not
  int64_t heads_at;                    // the merged output of attention
  int64_t partial_at, partial_sum_at;  // [row, head, chunk] of [head_dim] and of (base, sum): f32
  unsigned* epochs;                    // of each block
  uint32_t last_epoch;                 // renew(): a step that ends behind it is followed by epoch 1
  // Of each rank: the parts of o and down, [layer's parity][o, down][rank][row][pair].
  uint64_t* parts[kMaxPeers];
  int64_t part_words, total_part_words;  // of one rank's part; of the buffer, used or not
  const volatile int* stop;              // PeerTable's
  int rank, world;
  float eps, scale_log2;
  float inverse_hidden;   // where that is exact: multiplying is dividing then; 0 elsewhere
  int64_t operand_bytes;  // of the place that all operands share
  int operand_place, shared_place, residual_place;  // in shared memory, in bytes: a Layout's
  int layers, rows, hidden, heads, kv_heads, group, half_rotary;
  int block_shift, max_chunks, stages, norm_threads;
  int most_underway;  // stages of weights whose bytes are on their way
  int window[kMaxLayers];
  // Of 8-bit weights, of the first layer; null, of plain ones (decoder_fp8.cuh).
  const float* scales[kProducts];
  int scale_stride[kProducts];  // from those of a block of k to the next block's; 0: of whole rows
  // Of keys and values of E4M3, those of all rows of each head, or null.
  const float *k_scales, *v_scales;
  int scales_layer_stride;
  bool has_e4m3_cache, has_integers;
  bool is_int4, is_coarse;  // packed weights (decoder_int4.cuh); of a CoarseUnpack
};

using Kernel = void(Arguments);

/// Whether it is for a BesideWorker: every operand has the rows of both halves.
__host__ __device__ inline bool has_halves_beside(const Arguments& a) {
  return a.cuts[kOut].beside && !a.is_int4;
}

/// The same value, but made anew: what follows from it is not kept in registers over the whole loop
/// of layers. There are none to spare, and what is spilled comes back from the L2 cache: beside the
/// ring there is next to no L1.
__device__ inline int anew(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
/// A value that is found here, and not where it is needed: between one product and the next each
/// instruction is waited for, before the words are there none is.
__device__ inline void find_now(uint32_t& value) { asm volatile("" : "+r"(value)); }
__device__ inline void find_now(int& value) { asm volatile("" : "+r"(value)); }
__device__ inline void find_now(float2& value) { asm volatile("" : "+f"(value.x), "+f"(value.y)); }
template <class T>
__device__ void find_now(T*& value) {
  asm volatile("" : "+l"(value));
}
__device__ inline int this_thread() { return anew(static_cast<int>(threadIdx.x)); }

/// How many of a product's tiles this block has, if it has the first one.
__device__ inline int tiles_of_block(int tiles) { return (tiles - blockIdx.x - 1) / gridDim.x + 1; }

// -- Exchange --

/// The words that other blocks sent, of this block's replica.
__device__ inline const uint64_t* inbox(const Arguments& a, int64_t words) {
  return a.words + blockIdx.x % kReplicas * kReplicaWords + words;
}

// -- The units of attention: (row, KV head, chunk of keys) --

struct Unit {
  int row, kv_head, chunk, first_chunk, chunks;  // chunks: of the row, from first_chunk on
  int low, position;                             // the keys low .. position are visible

  __device__ int first_tile() const { return max(low, chunk * kChunk) / kTileKeys; }
  __device__ int tiles() const {
    return min(position, chunk * kChunk + kChunk - 1) / kTileKeys - first_tile() + 1;
  }
  /// The unit of this index; false past the last. Each row's last chunk, which may be short, comes
  /// behind those of all rows before it: what blocks have more than others is short then. Which
  /// index a unit has shows nowhere in the bits.
  __device__ bool find(const Arguments& a, const int* contexts, int layer, int index) {
#pragma unroll 1
    for (int last = 0; last < 2; ++last)
#pragma unroll 1
      for (row = 0; row < a.rows; ++row) {
        if (contexts[row] <= 0) continue;
        position = contexts[row] - 1;
        low = first_key(position, a.window[layer]);
        first_chunk = low / kChunk;
        const int before = position / kChunk - first_chunk,
                  units = (last ? 1 : before) * a.kv_heads;
        chunks = before + 1;
        if (index < units) {
          kv_head = index % a.kv_heads;
          chunk = first_chunk + (last ? before : index / a.kv_heads);
          return true;
        }
        index -= units;
      }
    return false;
  }
};

/// The blocks that have the fewest tiles of the matrices come first.
__device__ inline int first_unit() { return gridDim.x - 1 - blockIdx.x; }

/// The block's units of a layer, of the indices first_unit() and every grid's size on. The first
/// ones are found once for layers of one window: to find one takes a lone warp long.
struct OwnUnits {
  static constexpr int kFound = 4;
  Unit found[kFound];
  int count;
  /// By kFound threads, `thread` being the first of them: no other may go on before all have.
  __device__ void find(const Arguments& a, const int* contexts, int layer, int thread) {
    found[thread].find(a, contexts, layer, first_unit() + thread * gridDim.x);
    if (thread > 0) return;
    int total = 0;
    for (int row = 0; row < a.rows; ++row) {
      const int low = first_key(contexts[row] - 1, a.window[layer]);
      if (contexts[row] > 0)
        total += ((contexts[row] - 1) / kChunk - low / kChunk + 1) * a.kv_heads;
    }
    const int grid = gridDim.x;
    count = max(0, (total - first_unit() + grid - 1) / grid);
  }
  __device__ void get(Unit& unit, const Arguments& a, const int* contexts, int layer, int i) const {
    if (i < kFound)
      unit = found[i];
    else
      unit.find(a, contexts, layer, first_unit() + i * gridDim.x);
  }
};

// -- Shared memory --

template <int kHeadDim>
struct AttentionShared {
  Packed q[kHeadDim / 8][kMaxGroup];  // [8 elements][head]
  Packed p[kChunk / 8][kMaxGroup];    // weights: [8 keys][head]
  float maximum[kMaxGroup][kWarps];   // of each 16 keys
  float sum[kWarps][kWarp];
  // Where keys and values are E4M3: the scales of a chunk's; of the step's own.
  float scales[2][kChunk], new_scale[2];
};

/// The values of each row of the step.
template <int kHeadDim>
struct RowShared {
  float4 squares[kWarps / 4];  // of each warp that has a part in the row; 0 of the others
  float cos_sin[kHeadDim];
};

template <int kHeadDim>
struct Shared {
  AttentionShared<kHeadDim> attention;  // first: it may lie over the operand's end
  int context[kMaxRows], slot[kMaxRows];
  OwnUnits units, brought;  // of this layer; of the one whose keys and values are brought
  uint64_t full[kMostStages], empty[kMostStages];
  uint2 first_half[kMultiplying * kWarp];  // keep_first_half()
  uint64_t early;  // down's first atoms: the warps that gather have written them
  // A mixture's, for this layer: `routed`, the block's part of the router's product begins;
  // `chosen_all`, the experts have been chosen.
  uint64_t routed, chosen_all;
  float chosen_weights[kMostChosen];
  int chosen[kMostChosen];
  RowShared<kHeadDim> of_row[kMaxRows];  // last: only those of the step's rows are there
};

/// Behind an operand of E4M3 numbers of so many atoms: a scale for each atom, or one and the warps'
/// largest magnitudes.
__host__ __device__ inline int64_t bytes_of_scales(const Arguments& a, int64_t atoms) {
  if (!a.scales[kQkv]) return 0;
  return (a.scale_stride[kQkv] > 0 ? atoms : 1 + kWarps) * int64_t{sizeof(float)};
}

/// Where things lie behind the stages, in bytes. What is not used at the same time shares its
/// place, for each stage more lets memory work on while a product waits for its operand.
struct Layout {
  int64_t shared, residual, end;

  /// The operand is first. Attention's part of Shared lies over its end: qkv has read its operand
  /// by then, and o's is before it. Not so with a mixture, which has sums there.
  template <int kHeadDim>
  __host__ __device__ static Layout of(const Arguments& a) {
    const int64_t operand = round_up(a.operand_bytes + 128),
                  of_out = round_up(
                      int64_t{a.rows} * a.cuts[kOut].atoms * kAtomRow *
                          (a.cuts[kOut].beside ? 2 : 1) +
                      bytes_of_scales(a, a.cuts[kOut].atoms * (a.cuts[kOut].beside ? 2 : 1))),
                  attention = sizeof(AttentionShared<kHeadDim>);
    Layout at{};
    at.shared = a.mixture.per_token > 0        ? operand
                : operand - attention > of_out ? operand - attention
                                               : of_out;
    at.residual = at.shared +
                  round_up(static_cast<int64_t>(sizeof(Shared<kHeadDim>) -
                                                (kMaxRows - a.rows) * sizeof(RowShared<kHeadDim>)));
    at.end = at.residual + int64_t{a.rows} * a.hidden * 2;
    return at;
  }
  __host__ __device__ static int64_t round_up(int64_t bytes) { return (bytes + 127) / 128 * 128; }
};

/// The state that a consumer thread carries along.
template <int kHeadDim>
struct Worker {
  const Arguments& a;
  Shared<kHeadDim>& shared;
  unsigned char* operand;   // what is multiplied next: [k / 8][row][8]
  __nv_bfloat16* residual;  // [row][hidden]
  Ring ring;
  /// The warps that multiply have no part in the norms of few rows: they prepare the product.
  bool norms_apart = false;
  int layer = 0;
  uint32_t epoch = 0;
  /// Known to the compiler: the kernel is made once for the usual case alone (is_lean()), whose
  /// code is little more than half as long.
  bool lean = false;
  /// Likewise, of it, of mixtures and where a step has_single_row(): one row, of weights without
  /// biases, and no thread has more than one vector of a norm's row.
  bool alone = false;
  /// Likewise, of int4 weights where a step has_single_row(): the last warps make the norm.
  bool single = false;
  /// Likewise, where it is alone, but for mixtures of several ranks: no sums over ranks.
  bool one_rank = false;
  /// Likewise, of a mixture.
  bool mixture = false;
  /// Likewise, for o and down in halves of k (keep_first_half()).
  bool halves = false;
  /// Likewise, for o and down in halves of k that are multiplied at once (BesideWorker).
  bool beside = false;
  /// Likewise, of packed int4 weights, of which o and down alone may have such operands.
  bool int4 = false;
  /// Likewise, where such a step has more than four rows: most blocks have two units of attention,
  /// and a thread two rows of a norm.
  bool many = false;
  static constexpr bool kIsFp8 = false, kIsInt4 = false, kIsBeside = false, kHasSingleRow = false;
  static constexpr int kSums = 1;

  __device__ int rows() const { return alone ? 1 : a.rows; }
  /// The warps that multiply, the first ones. Those behind kMultiplying prepare operands as well.
  __device__ static constexpr int multiplying(int) { return kMultiplying; }
  /// Whether a product's operand has both halves of a row, in turns.
  __device__ bool has_pairs(const MatrixCut& cut) const { return beside || (int4 && cut.beside); }
  /// Of the operand: its columns, as tensor cores have them.
  __device__ int places() const { return beside ? 2 * rows() : rows(); }
  __device__ int places(const MatrixCut& cut) const { return has_pairs(cut) ? 2 * rows() : rows(); }

  /// To all blocks.
  __device__ void send_all(uint64_t* words, uint32_t data) const {
#pragma unroll
    for (int i = 0; i < kReplicas; ++i) send(words + i * kReplicaWords, tagged(data, epoch));
  }
  __device__ void together() const { sync_threads<1, kThreads>(); }
  /// The threads of together() that have a part in the norms. One instruction: racecheck takes one
  /// under a predicate for a barrier that all have passed.
  __device__ void norm_together() const {
    const int threads = single ? kNormThreads : norms_apart ? kGathering : kThreads;
    asm volatile("bar.sync 4, %0;" ::"r"(threads) : "memory");
  }
  /// The others have written the operand; the warps that multiply wait for that.
  /// Lanes come by different ways, and such a barrier is one of whole warps.
  __device__ void give_operand() const {
    __syncwarp();
    arrive_at<5, kThreads>();
  }
  __device__ void take_operand() const {
    __syncwarp();
    sync_threads<5, kThreads>();
  }
  /// The same of a part of the operand: what a run of multiply_held() takes.
  static constexpr int kPartThreads = kMultiplying * kWarp + kPairsOfPart;
  __device__ void give_part(int run) const {
    __syncwarp();
    asm volatile("bar.arrive %0, %1;" ::"r"(5 + run), "n"(kPartThreads) : "memory");
  }
  __device__ void take_part(int run) const {
    __syncwarp();
    asm volatile("bar.sync %0, %1;" ::"r"(5 + run), "n"(kPartThreads) : "memory");
  }
  /// The warps that multiply have read the operand; the others wait for that.
  __device__ void leave_operand() const { arrive_at<2, kThreads>(); }
  __device__ void await_operand() const { sync_threads<2, kThreads>(); }
  /// Among the warps that multiply: each has read the operand.
  __device__ void multiplied() const { sync_threads<3, kMultiplying * kWarp>(); }
  /// The threads in the order in which they should take what comes next: those that multiply come
  /// last, since they have still to send.
  __device__ int ready_thread() const { return (this_thread() + kGathering) % kThreads; }
  __device__ Packed& operand_at(const MatrixCut& cut, int row, int column) const {
    return *reinterpret_cast<Packed*>(operand + cut.operand_at +
                                      (column / 8 * places() + (beside ? 2 * row : row)) *
                                          sizeof(Packed));
  }
  /// The same where the halves of a row are seen as rows.
  __device__ Packed& operand_of_half(const MatrixCut& cut, int row, int column) const {
    return *reinterpret_cast<Packed*>(operand + cut.operand_at +
                                      (column / 8 * places(cut) + row) * sizeof(Packed));
  }
  /// This layer's, of a vector of the first one's; null stays null.
  __device__ const __nv_bfloat16* of_layer(const __nv_bfloat16* vector) const {
    return vector ? vector + layer * a.layer_stride : vector;
  }
};

/// Of weights whose o and down are in halves of k, which are multiplied at once (emit_beside()). An
/// operand has 8 columns, or 16 where the step has more than four rows.
template <int kHeadDim, bool kManyRows>
struct BesideWorker : Worker<kHeadDim> {
  static constexpr bool kIsBeside = true;
  static constexpr int kSums = kManyRows ? 2 : 1;
};

/// Of E4M3 weights and operands of one row (decoder_fp8.cuh). Scales are of blocks or, `kTokens`,
/// of whole rows of both. `kExperts`: of a mixture, whose router has plain weights. `kInt8`: of
/// integers, with scales of rows. `kBeside`: as a BesideWorker; `kHigh`: its tiles have many rows
/// of w, so that few blocks of k are in the ring.
template <int kHeadDim, bool kTokens, bool kExperts, bool kInt8, bool kBeside, bool kHigh>
struct Fp8Worker : Worker<kHeadDim> {
  static constexpr bool kIsFp8 = true, kHasTokens = kTokens, kHasExperts = kExperts,
                        kIntegers = kInt8, kIsBeside = kBeside, kIsHigh = kHigh;
  __device__ static constexpr int rows() { return 1; }
};

}  // namespace nanovllm::decoder
