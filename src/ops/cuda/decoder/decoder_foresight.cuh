// A guess at a layer's experts, by which their weights come as near as the L2 cache while memory
// would idle: attention, o and the router take longer than their weights do, and which experts a
// token needs is known behind them alone. Attention adds to the stream, which changes few of the
// choices, so the router's product with the stream before attention says most of them. Nothing else
// follows from the guess: an expert that it misses comes from memory as before, one that it has in
// vain takes a part of the time in which memory idles.
#pragma once

#include "ops/cuda/decoder/decoder_int4.cuh"

namespace nanovllm::decoder {

#if __CUDA_ARCH__ >= 900

__device__ inline float comparable(float logit) { return logit == logit ? logit : kMinusInfinity; }

/// By the warps that foresee() is not for: they have written their part of the stream.
template <int kHeadDim>
__device__ __forceinline__ void give_stream(const Worker<kHeadDim>&) {
  if (this_thread() / kWarp == kWarps - 1) return;
  __syncwarp();
  arrive_at<6, kThreads>();
}

/// Logits of the guess, up to the norm's factor, which all of them share: by one warp, while others
/// multiply qkv. Blocks have an expert each, in turns.
template <int kHeadDim>
__device__ __forceinline__ void foresee(const Worker<kHeadDim>& w) {
  const Arguments& a = w.a;
  const int warp = this_thread() / kWarp, lane = this_thread() % kWarp;
  if (warp != kWarps - 1) return;
  sync_threads<6, kThreads>();
#pragma unroll 1
  for (int expert = blockIdx.x; expert < a.mixture.experts; expert += gridDim.x) {
    const __nv_bfloat16 *weights = w.of_layer(a.mixture.router) + int64_t{expert} * a.hidden,
                        *norm = w.of_layer(a.norms[1]);
    float sum = 0.0f;
#pragma unroll 4
    for (int c = lane * 8; c < a.hidden; c += kWarp * 8) {
      const Packed x = *reinterpret_cast<const Packed*>(w.residual + c),
                   y = load_early(weights + c), z = load_early(norm + c);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 of_x = unpack(x.pair[i]), of_y = unpack(y.pair[i]), of_z = unpack(z.pair[i]);
        sum += of_x.x * of_z.x * of_y.x + of_x.y * of_z.y * of_y.y;
      }
    }
    sum = warp_sum(sum);
    if (lane == 0) w.send_all(a.words + a.mixture.foreseen_at + expert, __float_as_uint(sum));
  }
}

/// The logits of a token in a warp: a lane has every 32nd.
struct LaneLogits {
  static constexpr int kOfLane = kMostExperts / kWarp, kAsksEvery = 300;  // ns
  uint64_t word[kOfLane];

  /// Whether all of them are there; asks for them before.
  __device__ __forceinline__ bool ask(const Arguments& a, int64_t at, uint32_t epoch) {
    const uint64_t* from = inbox(a, at) + threadIdx.x % kWarp;
    bool there = true;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i)
      if (i * kWarp < a.mixture.experts) word[i] = read_word(from + i * kWarp);
#pragma unroll
    for (int i = 0; i < kOfLane; ++i)
      if (i * kWarp < a.mixture.experts) there = there && has(word[i], epoch);
    return __all_sync(kFullMask, there);
  }
  /// `rarely`: it asks rarely, since others wait for words.
  __device__ __forceinline__ void receive(const Arguments& a, int64_t at, uint32_t epoch,
                                          bool rarely) {
    while (!ask(a, at, epoch))
      if (rarely) __nanosleep(kAsksEvery);
  }
  __device__ __forceinline__ static float logit_of(uint64_t word) {
    return __uint_as_float(static_cast<uint32_t>(word));
  }
  /// Calls body(i, the lane's i-th logit).
  template <class Body>
  __device__ __forceinline__ void for_each(int experts, const Body& body) const {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i)
      if (i * kWarp < experts) body(i, logit_of(word[i]));
  }
  /// An expert's, which each lane may name another of.
  __device__ __forceinline__ float of(int expert) const {
    float logit = 0.0f;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const float other = __shfl_sync(kFullMask, logit_of(word[i]), expert % kWarp);
      if (i == expert / kWarp) logit = other;
    }
    return logit;
  }
  /// Lane i's is the i-th of the experts with the largest logits; of equals the first comes first.
  __device__ __forceinline__ int choose(int experts, int count) const {
    const int lane = threadIdx.x % kWarp;
    uint32_t key[kOfLane] = {};  // in the order of the logits; 0: none
    for_each(experts, [&](int i, float logit) {
      const uint32_t bits = __float_as_uint(comparable(logit) + 0.0f);  // there is one zero
      key[i] = bits >> 31 ? ~bits : bits | 1u << 31;
    });
    int chosen = 0;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      uint32_t own = 0, expert = kMostExperts;
#pragma unroll
      for (int j = 0; j < kOfLane; ++j) own = max(own, key[j]);
      const uint32_t most = __reduce_max_sync(kFullMask, own);
#pragma unroll
      for (int j = kOfLane - 1; j >= 0; --j)
        if (key[j] == most) expert = j * kWarp + lane;
      expert = __reduce_min_sync(kFullMask, expert);
#pragma unroll
      for (int j = 0; j < kOfLane; ++j)
        if (j * kWarp + lane == expert) key[j] = 0;
      if (lane == i) chosen = static_cast<int>(expert);
    }
    return chosen;
  }
};

// -- Of the warp that brings weights --

/// Brings a layer's router as near as the L2 cache.
__device__ inline void prefetch_router(const Arguments& a, int layer) {
  constexpr int kLine = 64;  // elements
  for (int expert = blockIdx.x; expert < a.mixture.experts; expert += gridDim.x)
    for (int c = threadIdx.x % kWarp * kLine; c < a.hidden; c += kWarp * kLine)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(a.mixture.router + layer * a.layer_stride +
                                                    int64_t{expert} * a.hidden + c));
}

/// The block's stages of experts' weights, in the order in which it multiplies them: its tiles of
/// gate_up, then those of down. By a whole warp, whose lane i has the number of the i-th expert.
/// Of int4 weights, what is said of atoms is so of chunks.
template <bool kInt4>
class ExpertStages {
 public:
  __device__ ExpertStages(const Arguments& arguments, int lanes_expert, int of_layer)
      : a_(arguments), layer_(of_layer), expert_(lanes_expert), tile_(blockIdx.x) {
    find();
  }
  __device__ bool at_end() const { return of_down_ && tile_ >= a_.cuts[kDown].tiles; }
  __device__ void next() {
    const MatrixCut& cut = a_.cuts[of_down_ ? kDown : kGateUp];
    const bool new_tile = ++stage_ == cut.stages;
    if (new_tile) stage_ = 0, tile_ += gridDim.x;
    if (new_tile || (of_down_ && atom_ + atoms_of_box(cut) == atoms_of(cut)))
      find();
    else if (kInt4)
      atom_ += chunks_of_stage(cut);
    else
      (of_down_ ? atom_ : matrix_) += of_down_ ? kExpertAtoms : cut.stage_atoms;
  }
  __device__ int bytes() const {
    const MatrixCut& cut = a_.cuts[of_down_ ? kDown : kGateUp];
    if (kInt4)
      return (of_down_ ? kExpertsAtOnce * kExpertColumns / 8 : cut.groups) * chunks_of_stage(cut) *
             kRecordBytes;
    return of_down_ ? kStageBytes : cut.groups * cut.stage_atoms * kAtomBytes;
  }
  /// To shared memory, or as near as the L2 cache: each lane that has a box of the stage, its own.
  __device__ void copy(unsigned char* to, uint64_t* barrier) const {
    const int lane = threadIdx.x % kWarp;
    if (lane >= boxes()) return;
    if (kInt4)
      copy_box_once(to + lane * kExpertBytes, map(), barrier, 0, atom_, row_, 0, matrix_);
    else
      copy_box_once(to + lane * kExpertBytes, map(), barrier, 0, 0, atom_, row_, matrix_);
  }
  __device__ void prefetch() const {
    if (static_cast<int>(threadIdx.x % kWarp) >= boxes()) return;
    if (kInt4)
      prefetch_box(map(), 0, atom_, row_, 0, matrix_);
    else
      prefetch_box(map(), 0, 0, atom_, row_, matrix_);
  }

 private:
  // Of down.
  __device__ static int atoms_of_box(const MatrixCut& cut) {
    return kInt4 ? chunks_of_stage(cut) : kExpertAtoms;
  }
  __device__ static int atoms_of(const MatrixCut& cut) {
    return kInt4 ? cut.atoms * kAtomDepth / kPackedColumns : cut.atoms;
  }
  __device__ int boxes() const { return of_down_ ? kExpertsAtOnce : 1; }
  __device__ const CUtensorMap* map() const { return &a_.maps[of_down_ ? kDown : kGateUp]; }
  /// The lane's box of the stage, on the map's last axes.
  __device__ void find() {
    const Mixture& m = a_.mixture;
    if (!of_down_ && tile_ >= a_.cuts[kGateUp].tiles) of_down_ = true, tile_ = blockIdx.x;
    const MatrixCut& cut = a_.cuts[of_down_ ? kDown : kGateUp];
    atom_ = 0;
    int of_token = 0;
    if (of_down_) {
      of_token = stage_ / (atoms_of(cut) / atoms_of_box(cut)) * kExpertsAtOnce +
                 static_cast<int>(threadIdx.x) % kExpertsAtOnce;
      row_ = tile_ * (kExpertColumns / 8);
    } else {
      of_token = tile_ / m.tiles;
      row_ = (tile_ - of_token * m.tiles) * (cut.columns_of_tile / 8);
    }
    const int* steps = of_down_ ? m.down_steps : m.gate_up_steps;
    matrix_ = __shfl_sync(kFullMask, expert_, of_token) * steps[0] + layer_ * steps[1];
  }

  const Arguments& a_;
  int layer_, expert_, tile_, stage_ = 0;  // stage_: of the tile
  int atom_, row_, matrix_;                // gate_up's first atom counts with its matrix
  bool of_down_ = false;
};

/// Brings stages of the experts of the guess nearer, until the block comes to the router: not all
/// at once, since words have to pass them, nor more than an H100's L2 cache holds.
template <bool kInt4>
__device__ __forceinline__ void bring_ahead(ExpertStages<kInt4> stages, uint64_t& routed,
                                            uint32_t parity) {
  constexpr int kMostAhead = 24, kPace = 1200;  // cycles from one to the next
  int64_t next = clock64();
#pragma unroll 1
  for (int i = 0; i < kMostAhead && !stages.at_end(); ++i) {
    stages.prefetch();
    stages.next();
    next += kPace;
    bool ends = false;
    while (!ends && clock64() < next) {
      __nanosleep(60);
      ends = has_ended(&routed, parity);
    }
    if (__any_sync(kFullMask, ends)) break;
  }
  wait_barrier(&routed, parity);
}

#endif

}  // namespace nanovllm::decoder
