// The matrix products of the decoder layers' kernel. One warpgroup makes a tile of outputs of all
// rows of the step: one chain of wgmma k16 over k in order, which gives the bits of
// gemm_in_order.cu (wgmma.cuh). Weights are the 64 rows of A, the rows of the step the 8 columns of
// B: a chain's step then takes 19 cycles however many outputs the tile has (as B's columns, 48 of
// them took 30). The chain's latency is what a product costs; so a run of it is straight code, and
// what can be done before the operand is there or after the outputs are gone is done then: a lone
// warp takes five cycles for each instruction, and tens for a branch.
#pragma once

#include "ops/cuda/decoder/decoder_layers.cuh"
#include "ops/cuda/ptx/gemm_wgmma.cuh"

namespace nanovllm::decoder {

/// Of the warp that brings weights, one thread: a tile's, from row `row` of a matrix on, whose
/// first atom is `first` on the map's last axis. Gate and up are there in turns, eight rows each.
/// `calm`: its stages of which `most` are on their way at once; of the others, `later`.
__device__ inline void bring_tile(Ring& ring, const CUtensorMap* map, const MatrixCut& cut, int row,
                                  int first, int calm, int most, int later) {
  for (int atom = 0; atom < cut.atoms; atom += cut.stage_atoms, --calm) {
    const RingCursor place = ring.claim(calm > 0 ? most : later);
    arrive_expecting(&ring.full[place.stage], cut.groups * cut.stage_atoms * kAtomBytes);
    copy_box_once(ring.at(place), map, &ring.full[place.stage], 0, 0, 0, row / 8, first + atom);
  }
}

/// Of a lane: of the outputs 16 warp + lane / 4 and 8 further on, of the rows lane % 4 * 2 and the
/// next.
using Sums = float[1][4];

/// A warp's outputs are columns of one expert: those of that expert's row go into `sums`.
__device__ __forceinline__ void put_expert(float (*sums)[64], int expert, int lane, const Sums& c) {
  if (lane % 4 != expert / 2) return;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    sums[expert][half * 8 + lane / 4] = expert % 2 ? c[0][2 * half + 1] : c[0][2 * half];
}

/// Whether the tiles of a product have both halves of k at once.
template <int kHeadDim>
__device__ __forceinline__ bool is_in_halves(const Worker<kHeadDim>& w, int product) {
  return w.beside ? product == kOut || product == kDown : w.has_pairs(w.a.cuts[product]);
}
/// Names the operand from `address` on: eight rows, of which those behind the step's are whatever
/// lies there. The next 16 elements of k are 2 `rows` further on.
__device__ __forceinline__ uint32_t describe_operand(int rows, uint32_t address) {
  return static_cast<uint32_t>(rows) << 16 | address >> 4;
}

/// The same with what is behind the lower half of the name: 128 bytes to the next eight columns.
template <int kSums>
__device__ __forceinline__ uint64_t operand_from(uint32_t x) {
  return kSums > 1 ? uint64_t{8} << 32 | x : x;
}

/// Down's first atoms of activations: by the warps that do not multiply, while gate_up goes on. The
/// first lane of each asks rarely, since memory is busy.
template <int kHeadDim>
__device__ __forceinline__ void gather_early(const Worker<kHeadDim>& w) {
  constexpr int kAsksEvery = 1000;  // ns
  if (w.alone) return;
  const MatrixCut& cut = w.a.cuts[kDown];
  const int total = cut.early_atoms * (kAtomDepth / 4), lane = threadIdx.x % kWarp;
  if (total == 0 || blockIdx.x >= cut.tiles) return;
#pragma unroll 1
  for (int i = this_thread() - kMultiplying * kWarp; i < total; i += kGathering) {
    const uint64_t* from = inbox(w.a, w.a.cuts[kGateUp].words + i * 2);
    WordPair pair{};
    if (lane == 0)
      for (pair.read(from); !pair.there(w.epoch); pair.read(from)) __nanosleep(kAsksEvery);
    __syncwarp();
    while (!pair.there(w.epoch)) pair.read(from);
    (&reinterpret_cast<uint2&>(w.operand_at(cut, 0, i / 2 * 8)))[i % 2] =
        uint2{static_cast<uint32_t>(pair.first), static_cast<uint32_t>(pair.second)};
  }
  fence_shared_for_async();
  __syncwarp();
  if (lane == 0) arrive(&w.shared.early);
}
/// Where a product is: in its operand, and in the ring (atoms of the stage ring.next).
struct Progress {
  Ring ring;
  uint32_t x;
  int inside;
};

/// The stage of an atom, counted as the atom is from a stage's start on.
__device__ __forceinline__ int stage_of(const MatrixCut& cut, int atom) {
  return atom * cut.inverse >> kInverseBits;
}

/// product<8>(), which replaces d unless it `accumulates`: written by anything but products, d
/// would make the compiler wait for each of them.
__device__ __forceinline__ void product_from(float* d, uint64_t a, uint64_t b, bool accumulates) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %6, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, "
      "0;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(a), "l"(b), "r"(int{accumulates}));
}

/// Starts c += weights x operand^T of some atoms: straight code that waits for nothing but, by
/// `await_operand`, for the operand; all that can be is done before. Lane i has the i-th atom's
/// `address`; `at_x`, where the operand is, moves on.
template <int kAtoms, int kHeadDim, int kSums, class Await>
__device__ __forceinline__ void begin_run(const Worker<kHeadDim>& w, uint32_t address,
                                          uint32_t& at_x, bool accumulates, float (&c)[kSums][4],
                                          const Await& await_operand) {
  uint32_t atoms[kAtoms];
#pragma unroll
  for (int i = 0; i < kAtoms; ++i) atoms[i] = __shfl_sync(kFullMask, address, i);
  await_operand();
  const uint32_t step_of_x = 2 * w.places();
  uint32_t x = __shfl_sync(kFullMask, at_x, 0);  // known to be the same in all lanes
  at_x += 4 * kAtoms * step_of_x;
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kAtoms; ++i)
#pragma unroll
    for (int step = 0; step < 4; ++step, x += step_of_x)
      if (w.halves && i == 0 && step == 0)
        product_from(c[0], tile_at(atoms[i]), x, accumulates);
      else
        product<8 * kSums>(c[0], tile_at(atoms[i]) + 2 * step, operand_from<kSums>(x));
  wgmma_commit();
}

/// c += weights x operand^T, of some atoms. A lane each waits for an atom before. At its end the
/// chain is waited for, since around a loop whose products are still under way the compiler waits
/// for each of them. `waits`: for the operand.
template <int kHeadDim, int kAtoms, int kSums>
__device__ __forceinline__ void multiply_atoms(const Worker<kHeadDim>& w, const MatrixCut& cut,
                                               Progress& p, int lane, bool accumulates, bool waits,
                                               bool last, float (&c)[kSums][4]) {
  const int at = p.inside + min(lane, kAtoms - 1), stage = stage_of(cut, at),
            in_stage = at - stage * cut.atoms_that_fit;
  const RingCursor place = p.ring.place(stage);
  p.ring.wait_full(place);
  __syncwarp();
  const uint32_t address = shared_address(p.ring.at(place)) + in_stage * cut.groups * kAtomBytes;
  begin_run<kAtoms>(w, address, p.x, accumulates, c, [&] {
    if (waits) w.take_operand();
  });
  wgmma_wait<0>();
  const bool ends = in_stage + 1 == cut.atoms_that_fit || (last && lane == kAtoms - 1);
  if (lane < kAtoms && ends) p.ring.release(place, kWarps / kMultiplying);
  p.inside += kAtoms;
  const int passed = stage_of(cut, p.inside);
  p.ring.advance(passed);
  p.inside -= passed * cut.atoms_that_fit;
}

/// Of a weight in halves of k: a lane's sums of the first are kept in shared memory, for registers
/// are few.
template <int kHeadDim, int kSums>
__device__ __forceinline__ void keep_first_half(const Worker<kHeadDim>& w, float (&c)[kSums][4]) {
  pin(c);
  w.shared.first_half[this_thread()] = {pack_bf16(c[0][0], c[0][1]), pack_bf16(c[0][2], c[0][3])};
}
template <int kHeadDim, int kSums>
__device__ __forceinline__ void add_first_half(const Worker<kHeadDim>& w, float (&c)[kSums][4]) {
  const uint2 kept = w.shared.first_half[this_thread()];
  FirstHalf<4>{{kept.x, kept.y}}.add_to(c[0]);
}

/// The part of its operand that a product waits for.
enum class Waits { no, all, parts };

/// multiply() of a tile whose stages are all in the ring at once, as they are by the time that the
/// operand is: a lane waits for its atoms before, and between the runs of a chain there is little.
template <int kHeadDim, int kSums>
__device__ __forceinline__ void multiply_held(const Worker<kHeadDim>& w, const Ring& ring,
                                              const MatrixCut& cut, int lane, Waits waits,
                                              float (&c)[kSums][4]) {
  uint32_t address[kMostHeld / kWarp];
#pragma unroll
  for (int i = 0; i < kMostHeld / kWarp; ++i) {
    const int at = min(lane + i * kWarp, cut.atoms - 1), stage = stage_of(cut, at);
    const RingCursor place = ring.place(stage);
    ring.wait_full(place);
    address[i] = shared_address(ring.at(place)) +
                 (at - stage * cut.atoms_that_fit) * cut.groups * kAtomBytes;
  }
  const RingCursor own = ring.place(min(lane, cut.stages - 1));
  uint32_t at_x = describe_operand(w.places(), shared_address(w.operand) + cut.operand_at);
  __syncwarp();
  const auto begin = [&]<int kAtoms>(int run, bool accumulates) {
    begin_run<kAtoms>(w, address[0], at_x, accumulates, c, [&] {
      if (w.lean && waits == Waits::parts)
        w.take_part(run / kAtomsOfPart);
      else if (waits != Waits::no && run == 0)
        w.take_operand();
    });
  };
#pragma unroll 1
  for (int run = 0, atoms; run < cut.atoms; run += atoms) {
    const bool second = w.halves && run == cut.atoms - cut.second_atoms;
    if (second) keep_first_half(w, c);
    const bool is_short = w.beside && (w.lean ? waits == Waits::parts : cut.atoms - run < kRun);
    atoms = is_short ? kAtomsOfPart : kRun;
    if (is_short)
      begin.template operator()<kAtomsOfPart>(run, true);
    else
      begin.template operator()<kRun>(run, !second);
    // The next run's come to the first lanes: a constant lane's value is known to be all lanes'.
    const uint32_t later = __shfl_sync(kFullMask, address[0], lane + atoms & kWarp - 1);
    address[1] = __shfl_sync(kFullMask, address[1], lane + atoms & kWarp - 1);
    address[0] = lane < kWarp - atoms ? later : address[1];
    wgmma_wait<0>();
  }
  pin(c);
  if (w.halves && cut.second_atoms > 0) add_first_half(w, c);
  if (lane < cut.stages) ring.release(own, kWarps / kMultiplying);
}

/// c = weights x operand^T of a tile, by the first four warps. All products of all tiles share this
/// code: what is run once a layer is not in the instruction cache.
template <int kHeadDim, int kSums>
__device__ __forceinline__ void multiply(const Worker<kHeadDim>& w, const Ring& ring,
                                         const MatrixCut& cut, int lane, Waits waits,
                                         float (&c)[kSums][4]) {
  if (w.lean || (kSums == 1 && cut.held)) return multiply_held(w, ring, cut, lane, waits, c);
  Progress p{ring, describe_operand(w.places(), shared_address(w.operand) + cut.operand_at), 0};
  const int waits_at = waits != Waits::no ? cut.atoms - cut.early_atoms : -1;
  if (!w.alone && waits != Waits::no && cut.early_atoms > 0)
    wait_barrier(&w.shared.early, w.layer & 1);
  constexpr int kAtOnce = kSums > 1 ? kRun / 2 : kRun;
#pragma unroll 1
  for (int left = cut.atoms; left > 0;) {
    const bool second = w.halves && left == cut.second_atoms;
    if (second) keep_first_half(w, c);
    const int of_chain = w.halves && left > cut.second_atoms ? left - cut.second_atoms : left;
    if (of_chain >= kAtOnce && !cut.streams && cut.atoms - left >= cut.fine_atoms) {
      multiply_atoms<kHeadDim, kAtOnce>(w, cut, p, lane, !second, left == waits_at, left == kAtOnce,
                                        c);
      left -= kAtOnce;
    } else if (of_chain >= 4) {
      multiply_atoms<kHeadDim, 4>(w, cut, p, lane, !second, left == waits_at, left == 4, c);
      left -= 4;
    } else {
      multiply_atoms<kHeadDim, 1>(w, cut, p, lane, !second, left == waits_at, left == 1, c);
      --left;
    }
  }
  pin(c);
  if (w.halves && cut.second_atoms > 0) add_first_half(w, c);
}

}  // namespace nanovllm::decoder
