// E4M3 weights in the decoder layers' kernel, with scales of blocks of 128 x 128, and operands
// whose blocks of 128 of k are quantised where they are written: by the definition of
// docs/contract.md, with the bits of quantise_rows.cuh and gemm_fp8.cuh.
//
// An atom is a block of k: 8 rows of 128 numbers, which are as many bytes as 64 of bf16. So tiles,
// stages and the ring are those of plain weights of half as many columns, and an operand is
// [k / 16][row][16]; behind it are its scales, [k / 128][kMaxRows].
#pragma once

#include "ops/cuda/decoder/decoder_multiply.cuh"
#include "ops/cuda/ptx/fp8_wgmma.cuh"
#include "ops/cuda/ptx/e4m3.cuh"

namespace nanovllm::decoder {

constexpr int kBlock = kAtomRow;              // numbers of k
constexpr int kScalesOfBlock = kMaxRows * 4;  // bytes

// -- Operands --

template <int kHeadDim>
__device__ __forceinline__ uint32_t number_at(const Worker<kHeadDim>& w, const MatrixCut& cut,
                                              int row, int column) {
  return shared_address(w.operand) + cut.operand_at + (column / 16 * w.rows() + row) * 16 +
         column % 16;
}
/// The operand's scales.
template <int kHeadDim>
__device__ __forceinline__ uint32_t scales_at(const Worker<kHeadDim>& w, const MatrixCut& cut) {
  return shared_address(w.operand) + cut.operand_at + w.rows() * cut.atoms * kBlock;
}
template <int kHeadDim>
__device__ __forceinline__ void put_scale(const Worker<kHeadDim>& w, const MatrixCut& cut,
                                          int block, int row, float scale) {
  store_shared(scales_at(w, cut) + block * kScalesOfBlock + row * 4, __float_as_uint(scale));
}

__device__ inline float most_of(uint32_t pair) {
  const float2 value = unpack(pair);
  return nanovllm::most_of(fabsf(value.x), fabsf(value.y));
}
__device__ inline uint32_t quantise_four(uint32_t first, uint32_t second, float scale) {
  const auto quantised = [&](uint32_t pair) -> uint32_t {
    const float2 x = unpack(pair);
    return __nv_cvt_float2_to_fp8x2({__fdiv_rn(x.x, scale), __fdiv_rn(x.y, scale)}, __NV_SATFINITE,
                                    __NV_E4M3);
  };
  return quantised(first) | quantised(second) << 16;
}

/// Eight elements of a row to the operand, from column `column` on; sixteen lanes in a row have a
/// block, and all of them come here.
template <int kHeadDim>
__device__ __forceinline__ void put_quantised(const Worker<kHeadDim>& w, const MatrixCut& cut,
                                              int row, int column, const Packed& x) {
  constexpr int kLanes = kBlock / 8;
  float most = 0.0f;
#pragma unroll
  for (const uint32_t pair : x.pair) most = nanovllm::most_of(most, most_of(pair));
  const unsigned half = threadIdx.x % kWarp / kLanes;
  const float scale = row_scale(most_of_lanes<kLanes>(most, 0xffffu << half * kLanes));
  store_shared(number_at(w, cut, row, column), quantise_four(x.pair[0], x.pair[1], scale),
               quantise_four(x.pair[2], x.pair[3], scale));
  if (column % kBlock == 0) put_scale(w, cut, column / kBlock, row, scale);
}

/// gather(): a warp has a block of a row at a time, of which it asks for several at once. `thread`:
/// in the order of ready_thread(). Where blocks are few, the warps that multiply have none: they
/// have sent outputs, for which their fence would wait.
template <int kHeadDim>
__device__ __forceinline__ void gather_quantised(const Worker<kHeadDim>& w, const MatrixCut& cut,
                                                 int64_t sent, bool absent, int thread) {
  constexpr int kAtOnce = 6, kFew = kGathering / kWarp * kPairsGathered;
  const int lane = thread % kWarp, blocks = w.rows() * cut.atoms,
            warps = (blocks <= kFew ? kGathering : kThreads) / kWarp;
  if (thread / kWarp >= warps) return;
#pragma unroll 1
  for (int first = thread / kWarp; first < blocks; first += kAtOnce * warps) {
    WordPair pair[kAtOnce] = {};
    uint32_t missing = 0;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (const int block = first + j * warps;
          block < blocks && !(absent && w.shared.context[block / cut.atoms] <= 0))
        missing |= 1u << j;
    const uint64_t* from = inbox(w.a, sent + (int64_t{first} * kWarp + lane) * 2);
    receive_all(pair, missing, w.epoch, [&](int j) { return from + j * warps * kWarp * 2; });
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int block = first + j * warps, row = block / cut.atoms, of_row = block % cut.atoms;
      if (block >= blocks) break;
      const auto low = static_cast<uint32_t>(pair[j].first),
                 high = static_cast<uint32_t>(pair[j].second);
      const float scale =
          row_scale(most_of_lanes<kWarp>(nanovllm::most_of(most_of(low), most_of(high))));
      const uint32_t to = number_at(w, cut, row, of_row * kBlock + lane * 4);
      store_shared(to, quantise_four(low, high, scale));
      if (lane == 0) put_scale(w, cut, of_row, row, scale);
    }
  }
  fence_shared_for_async();
}

// -- Products --

/// Of a tile, those of a lane's outputs: of its warp's first eight rows of w, and of the next eight
/// (of gate and of up), for block `block` of k.
template <int kHeadDim>
__device__ __forceinline__ float2 weight_scales(const Worker<kHeadDim>& w, const MatrixCut& cut,
                                                int product, int tile, int warp, int block) {
  constexpr int kElementsOfFloat = sizeof(float) / sizeof(__nv_bfloat16);
  if (block >= cut.atoms) return {};
  const bool gated = product == kGateUp;
  // Behind the matrix a warp has rows that nobody needs.
  const int units = cut.columns / 8,  // of one half
      own = tile * (cut.columns_of_tile / 8) + (gated ? warp : 2 * warp),
            unit = min(own, units - 1),
            next = gated             ? units
                   : own + 1 < units ? 1
                                     : 0;
  const float* scales = w.a.scales[product] + w.layer * (w.a.layer_stride / kElementsOfFloat) +
                        int64_t{block} * w.a.scale_stride[product] + unit;
  return {__ldg(scales), __ldg(scales + next)};
}

/// c += p(b) * (scale of the row * scale of w) for the next blocks b of k, in ascending order,
/// whose atoms a lane each waits for (multiply_atoms()). Lane `from` + i has w's scales of the
/// i-th, and `of_rows` names those of the lane's rows.
template <int kAtoms, int kHeadDim>
__device__ __forceinline__ void multiply_blocks(const Worker<kHeadDim>& w, const MatrixCut& cut,
                                                Progress& p, int lane, float2 scales, int from,
                                                uint32_t of_rows, bool waits, bool last, Sums& c) {
  const int at = p.inside + min(lane, kAtoms - 1), stage = stage_of(cut, at),
            in_stage = at - stage * cut.atoms_that_fit;
  const RingCursor place = p.ring.place(stage);
  p.ring.wait_full(place);
  __syncwarp();
  const uint32_t address = shared_address(p.ring.at(place)) + in_stage * cut.groups * kAtomBytes;
  uint32_t atoms[kAtoms];
#pragma unroll
  for (int i = 0; i < kAtoms; ++i) atoms[i] = __shfl_sync(kFullMask, address, i);
  if (waits) w.take_operand();
  const uint32_t step_of_x = 2 * w.rows();
  uint32_t x = __shfl_sync(kFullMask, p.x, 0);  // known to be the same in all lanes
  p.x += 4 * kAtoms * step_of_x;
  Sums part[kAtoms];
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kAtoms; ++i) {
    e4m3_product<8, false>(part[i][0], tile_at(atoms[i]), x);
#pragma unroll
    for (int step = 1; step < 4; ++step)
      e4m3_product<8, true>(part[i][0], tile_at(atoms[i]) + 2 * step, x + step * step_of_x);
    x += 4 * step_of_x;
    wgmma_commit();
  }
  const auto add = [&]<int i>() {
    float2 of_row;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(of_row.x), "=f"(of_row.y)
                 : "r"(of_rows + i * kScalesOfBlock)
                 : "memory");
    const float first = __shfl_sync(kFullMask, scales.x, from + i),
                second = __shfl_sync(kFullMask, scales.y, from + i);
    wgmma_wait<kAtoms - 1 - i>();
    pin(part[i]);
    c[0][0] = fmaf(part[i][0][0], of_row.x * first, c[0][0]);
    c[0][1] = fmaf(part[i][0][1], of_row.y * first, c[0][1]);
    c[0][2] = fmaf(part[i][0][2], of_row.x * second, c[0][2]);
    c[0][3] = fmaf(part[i][0][3], of_row.y * second, c[0][3]);
  };
  [&]<int... i>(std::integer_sequence<int, i...>) { (add.template operator()<i>(), ...); }
  (std::make_integer_sequence<int, kAtoms>());
  const bool ends = in_stage + 1 == cut.atoms_that_fit || (last && lane == kAtoms - 1);
  if (lane < kAtoms && ends) p.ring.release(place, kWarps / kMultiplying);
  p.inside += kAtoms;
  const int passed = stage_of(cut, p.inside);
  p.ring.advance(passed);
  p.inside -= passed * cut.atoms_that_fit;
}

/// multiply() of E4M3 numbers.
template <int kHeadDim>
__device__ __forceinline__ void multiply_fp8(const Worker<kHeadDim>& w, const Ring& ring,
                                             const MatrixCut& cut, int product, int tile, int warp,
                                             int lane, Sums& c) {
  const uint32_t operand = shared_address(w.operand) + cut.operand_at;
  uint32_t of_rows = scales_at(w, cut) + lane % 4 * 8;
  Progress p{ring, describe_operand(w.rows(), operand), 0};
  // Asked for long before they are needed: they come from memory.
  const auto scales = [&](int block) { return weight_scales(w, cut, product, tile, warp, block); };
  float2 now{}, next = scales(lane);
#pragma unroll 1
  for (int done = 0; done < cut.atoms;) {
    if (done % kWarp == 0) now = next, next = scales(done + kWarp + lane);
    const int left = cut.atoms - done;
    const auto run = [&]<int kAtoms>() {
      multiply_blocks<kAtoms>(w, cut, p, lane, now, done % kWarp, of_rows,
                              tile == blockIdx.x && done == 0, left == kAtoms, c);
      done += kAtoms;
      of_rows += kAtoms * kScalesOfBlock;
    };
    if (left >= 4)
      run.template operator()<4>();
    else
      run.template operator()<1>();
  }
}

}  // namespace nanovllm::decoder
