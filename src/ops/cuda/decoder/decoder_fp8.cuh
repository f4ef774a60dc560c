// E4M3 weights in the decoder layers' kernel, with scales of blocks of 128 x 128, and operands
// whose blocks of 128 of k are quantised where they are written; or both with scales of whole rows.
// By the definition of docs/contract.md, with the bits of quantise_rows.cuh and gemm_fp8.cuh.
//
// An atom is a block of k: 8 rows of 128 numbers, which are as many bytes as 64 of bf16. So tiles,
// stages and the ring are those of plain weights of half as many columns, and an operand is
// [k / 16][row][16]. Behind it are its scales, [k / 128][kMaxRows], or [kMaxRows] of whole rows and
// behind them what each warp has found to be the largest magnitude of a row, [row][kWarps].
#pragma once

#include "ops/cuda/decoder/decoder_multiply.cuh"
#include "ops/cuda/ptx/fp8_wgmma.cuh"
#include "ops/cuda/ptx/e4m3.cuh"

namespace nanovllm::decoder {

constexpr int kBlock = kAtomRow;              // numbers of k
constexpr int kScalesOfBlock = kMaxRows * 4;  // bytes

// -- Operands --

template <class Worker>
__device__ __forceinline__ uint32_t number_at(const Worker& w, const MatrixCut& cut, int row,
                                              int column) {
  return shared_address(w.operand) + cut.operand_at + (column / 16 * w.rows() + row) * 16 +
         column % 16;
}
/// The operand's scales.
template <class Worker>
__device__ __forceinline__ uint32_t scales_at(const Worker& w, const MatrixCut& cut) {
  return shared_address(w.operand) + cut.operand_at + w.rows() * cut.atoms * kBlock;
}
template <class Worker>
__device__ __forceinline__ void put_scale(const Worker& w, const MatrixCut& cut, int block, int row,
                                          float scale) {
  store_shared(scales_at(w, cut) + block * kScalesOfBlock + row * 4, __float_as_uint(scale));
}

__device__ inline float most_of(uint32_t pair) {
  const float2 value = unpack(pair);
  return nanovllm::most_of(fabsf(value.x), fabsf(value.y));
}
__device__ inline float most_of(const Packed& x) {
  float most = 0.0f;
#pragma unroll
  for (const uint32_t pair : x.pair) most = nanovllm::most_of(most, most_of(pair));
  return most;
}
__device__ inline uint32_t quantise_four(uint32_t first, uint32_t second, float scale) {
  const auto quantised = [&](uint32_t pair) -> uint32_t {
    const float2 x = unpack(pair);
    return __nv_cvt_float2_to_fp8x2({__fdiv_rn(x.x, scale), __fdiv_rn(x.y, scale)}, __NV_SATFINITE,
                                    __NV_E4M3);
  };
  return quantised(first) | quantised(second) << 16;
}

// Scales of whole rows: warps note what they have found, and behind a barrier all may ask.

/// By whole warps.
template <class Worker>
__device__ __forceinline__ void note_most(const Worker& w, const MatrixCut& cut, int row, int warp,
                                          float most) {
  __syncwarp();
  most = most_of_lanes<kWarp>(most);
  if (threadIdx.x % kWarp == 0)
    put_scale(w, cut, 1 + (row * kWarps + warp) / kMaxRows, (row * kWarps + warp) % kMaxRows, most);
}
/// The scale of a row, of which the first `warps` have noted something. By whole warps.
template <class Worker>
__device__ __forceinline__ float noted_scale(const Worker& w, const MatrixCut& cut, int row,
                                             int warps) {
  const auto* noted =
      reinterpret_cast<const float*>(w.operand + cut.operand_at + w.rows() * cut.atoms * kBlock) +
      kMaxRows + row * kWarps;
  const int lane = threadIdx.x % kWarp;
  __syncwarp();
  return row_scale(most_of_lanes<kWarp>(lane < warps ? noted[lane] : 0.0f));
}

// The norms' rows.

template <class Worker>
__device__ __forceinline__ void put_eight(const Worker& w, const MatrixCut& cut, int row,
                                          int column, const Packed& x, float scale) {
  store_shared(number_at(w, cut, row, column), quantise_four(x.pair[0], x.pair[1], scale),
               quantise_four(x.pair[2], x.pair[3], scale));
}
/// The same with the scale of their block, of which sixteen lanes in a row have eight elements
/// each, and all of them come here.
template <class Worker>
__device__ __forceinline__ void put_block(const Worker& w, const MatrixCut& cut, int row,
                                          int column, const Packed& x) {
  constexpr int kLanes = kBlock / 8;
  const unsigned half = threadIdx.x % kWarp / kLanes;
  const float scale = row_scale(most_of_lanes<kLanes>(most_of(x), 0xffffu << half * kLanes));
  put_eight(w, cut, row, column, x, scale);
  if (column % kBlock == 0) put_scale(w, cut, column / kBlock, row, scale);
}

/// normalise_held()'s end: `normal` is a thread's part of a row, where `present`; else zeros.
template <class Worker>
__device__ __forceinline__ void put_normal(const Worker& w, int row, int thread, bool present,
                                           const Packed& normal) {
  const MatrixCut& cut = w.a.cuts[kQkv];
  if constexpr (Worker::kHasTokens) {
    if (row < w.rows()) note_most(w, cut, row, thread / kWarp, most_of(normal));
    w.norm_together();
    if (row >= w.rows()) return;
    const float scale = noted_scale(w, cut, row, w.a.norm_threads / kWarp);
    if (present) put_eight(w, cut, row, thread * 8, normal, scale);
    if (thread == 0) put_scale(w, cut, 0, row, scale);
  } else {
    if (present) put_block(w, cut, row, thread * 8, normal);
  }
}

/// add_and_normalise()'s end, for rows first_row, first_row + at_once ..; `thread`: of those of a
/// row, whose first weights are `first_weight`.
template <class Worker>
__device__ __forceinline__ void put_normals(const Worker& w, const __nv_bfloat16* weights,
                                            const Packed& first_weight, int first_row, int at_once,
                                            int thread) {
  const Arguments& a = w.a;
  const MatrixCut& cut = a.cuts[kQkv];
  const int step = a.norm_threads * 8;
  const auto for_normals = [&](int row, const auto& put) {
    const float reciprocal = reciprocal_of(w, row);
    for (int c = thread * 8; c < a.hidden; c += step) {
      Packed x = *reinterpret_cast<const Packed*>(w.residual + row * a.hidden + c),
             weight = first_weight;
      if (c != thread * 8) weight = *reinterpret_cast<const Packed*>(weights + c);
      normalise(x, reciprocal, weight);
      put(c, x);
    }
  };
  if constexpr (Worker::kHasTokens) {
    for (int row = first_row; row < a.rows; row += at_once) {
      float most = 0.0f;
      for_normals(row, [&](int, const Packed& x) { most = nanovllm::most_of(most, most_of(x)); });
      note_most(w, cut, row, thread / kWarp, most);
    }
    w.norm_together();
    for (int row = first_row; row < a.rows; row += at_once) {
      const float scale = noted_scale(w, cut, row, a.norm_threads / kWarp);
      for_normals(row, [&](int c, const Packed& x) { put_eight(w, cut, row, c, x, scale); });
      if (thread == 0) put_scale(w, cut, 0, row, scale);
    }
  } else {
    for (int row = first_row; row < a.rows; row += at_once)
      for_normals(row, [&](int c, const Packed& x) { put_block(w, cut, row, c, x); });
  }
}

// What other blocks sent.

/// Calls put(block, a lane's first two elements, its next two) of `blocks` blocks of 128
/// elements that lie in a row from `from` on; a warp asks for several of its own at once.
/// `is_sent`: else they are zeros.
template <class IsSent, class Put>
__device__ __forceinline__ void for_sent_blocks(const uint64_t* from, int blocks, int warp,
                                                int warps, uint32_t epoch, const IsSent& is_sent,
                                                const Put& put) {
  constexpr int kAtOnce = 6;
  const int lane = threadIdx.x % kWarp;
#pragma unroll 1
  for (int first = warp; first < blocks; first += kAtOnce * warps) {
    WordPair pair[kAtOnce] = {};
    uint32_t missing = 0;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (const int block = first + j * warps; block < blocks && is_sent(block)) missing |= 1u << j;
    const uint64_t* own = from + (int64_t{first} * kWarp + lane) * 2;
    receive_all(pair, missing, epoch, [&](int j) { return own + j * warps * kWarp * 2; });
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (first + j * warps >= blocks) break;
      put(first + j * warps, static_cast<uint32_t>(pair[j].first),
          static_cast<uint32_t>(pair[j].second));
    }
  }
}

/// gather(). `thread`: in the order of ready_thread(). Where blocks are few, the warps that
/// multiply have none: they have sent outputs, for which their fence would wait. With scales of
/// whole rows the words are read twice.
template <class Worker>
__device__ __forceinline__ void gather_quantised(const Worker& w, const MatrixCut& cut,
                                                 int64_t sent, bool absent, int thread) {
  constexpr int kFew = kGathering / kWarp * kPairsGathered;
  const int lane = thread % kWarp, warp = thread / kWarp;
  const uint64_t* from = inbox(w.a, sent);
  const auto is_sent = [&](int row) { return !(absent && w.shared.context[row] <= 0); };
  const auto put = [&](int row, int block, uint32_t low, uint32_t high, float scale) {
    store_shared(number_at(w, cut, row, block * kBlock + lane * 4),
                 quantise_four(low, high, scale));
  };
  if constexpr (Worker::kHasTokens) {
    // Each row has warps of its own.
    const int of_row = kWarps / w.rows(), row = warp / of_row, own = warp % of_row;
    const auto for_own = [&](const auto& use) {
      for_sent_blocks(
          from + int64_t{row} * cut.atoms * kWarp * 2, cut.atoms, own, of_row, w.epoch,
          [&](int) { return is_sent(row); }, use);
    };
    const bool has_row = row < w.rows();
    if (has_row) {
      float most = 0.0f;
      for_own([&](int, uint32_t low, uint32_t high) {
        most = nanovllm::most_of(most, nanovllm::most_of(most_of(low), most_of(high)));
      });
      note_most(w, cut, row, own, most);
    }
    w.together();
    if (has_row) {
      const float scale = noted_scale(w, cut, row, of_row);
      for_own([&](int block, uint32_t low, uint32_t high) { put(row, block, low, high, scale); });
      if (own == 0 && lane == 0) put_scale(w, cut, 0, row, scale);
    }
  } else {
    const int blocks = w.rows() * cut.atoms,
              warps = (blocks <= kFew ? kGathering : kThreads) / kWarp;
    if (warp >= warps) return;
    for_sent_blocks(
        from, blocks, warp, warps, w.epoch, [&](int block) { return is_sent(block / cut.atoms); },
        [&](int block, uint32_t low, uint32_t high) {
          const int row = block / cut.atoms, of_row = block % cut.atoms;
          const float scale =
              row_scale(most_of_lanes<kWarp>(nanovllm::most_of(most_of(low), most_of(high))));
          put(row, of_row, low, high, scale);
          if (lane == 0) put_scale(w, cut, of_row, row, scale);
        });
  }
  fence_shared_for_async();
}

// -- Products --

/// Of a tile, the scales of a lane's outputs: with scales of blocks those of its warp's first eight
/// rows of w, and of the next eight (of gate and of up), for block `block` of k; else of the lane's
/// rows.
template <class Worker>
__device__ __forceinline__ float2 weight_scales(const Worker& w, const MatrixCut& cut, int product,
                                                int tile, int warp, int lane, int block) {
  constexpr int kElementsOfFloat = sizeof(float) / sizeof(__nv_bfloat16),
                kRows = Worker::kHasTokens ? 1 : 8;  // that share one
  if (block >= cut.atoms) return {};
  const bool gated = product == kGateUp;
  // Behind the matrix a warp has rows that nobody needs.
  const int units = cut.columns / kRows,  // of one half
      in_tile = (gated ? 8 : 16) * warp + (Worker::kHasTokens ? lane / 4 : 0),
            own = (tile * cut.columns_of_tile + in_tile) / kRows, unit = min(own, units - 1),
            next = gated ? units : min(own + 8 / kRows, units - 1) - unit;
  const float* scales = w.a.scales[product] + w.layer * (w.a.layer_stride / kElementsOfFloat) +
                        int64_t{block} * w.a.scale_stride[product] + unit;
  return {__ldg(scales), __ldg(scales + next)};
}
__device__ inline float2 row_scales(uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
  return x;
}

/// c += p(b) * (scale of the row * scale of w), or p(b), for the next blocks b of k, in ascending
/// order, whose atoms a lane each waits for (multiply_atoms()). Lane `from` + i has w's scales of
/// the i-th, and `of_rows` names those of the lane's rows.
template <int kAtoms, class Worker>
__device__ __forceinline__ void multiply_blocks(const Worker& w, const MatrixCut& cut, Progress& p,
                                                int lane, float2 scales, int from, uint32_t of_rows,
                                                bool waits, bool last, Sums& c) {
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
    if constexpr (Worker::kHasTokens) {
      wgmma_wait<kAtoms - 1 - i>();
      pin(part[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) c[0][j] += part[i][0][j];
    } else {
      const float2 of_row = row_scales(of_rows + i * kScalesOfBlock);
      const float first = __shfl_sync(kFullMask, scales.x, from + i),
                  second = __shfl_sync(kFullMask, scales.y, from + i);
      wgmma_wait<kAtoms - 1 - i>();
      pin(part[i]);
      c[0][0] = fmaf(part[i][0][0], of_row.x * first, c[0][0]);
      c[0][1] = fmaf(part[i][0][1], of_row.y * first, c[0][1]);
      c[0][2] = fmaf(part[i][0][2], of_row.x * second, c[0][2]);
      c[0][3] = fmaf(part[i][0][3], of_row.y * second, c[0][3]);
    }
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
template <class Worker>
__device__ __forceinline__ void multiply_fp8(const Worker& w, const Ring& ring,
                                             const MatrixCut& cut, int product, int tile, int warp,
                                             int lane, Sums& c) {
  const uint32_t operand = shared_address(w.operand) + cut.operand_at;
  uint32_t of_rows = scales_at(w, cut) + lane % 4 * 8;
  Progress p{ring, describe_operand(w.rows(), operand), 0};
  // Asked for long before they are needed: they come from memory.
  const auto scales = [&](int block) {
    return weight_scales(w, cut, product, tile, warp, lane, block);
  };
  float2 now{}, next = scales(Worker::kHasTokens ? 0 : lane);
#pragma unroll 1
  for (int done = 0; done < cut.atoms;) {
    if (!Worker::kHasTokens && done % kWarp == 0) now = next, next = scales(done + kWarp + lane);
    const int left = cut.atoms - done;
    const auto run = [&]<int kAtoms>() {
      multiply_blocks<kAtoms>(w, cut, p, lane, now, done % kWarp, of_rows,
                              tile == blockIdx.x && done == 0, left == kAtoms, c);
      done += kAtoms;
      if (!Worker::kHasTokens) of_rows += kAtoms * kScalesOfBlock;
    };
    if (left >= 4)
      run.template operator()<4>();
    else
      run.template operator()<1>();
  }
  if constexpr (Worker::kHasTokens) {
    const float2 of_row = row_scales(of_rows);
    c[0][0] *= of_row.x * next.x;
    c[0][1] *= of_row.y * next.x;
    c[0][2] *= of_row.x * next.y;
    c[0][3] *= of_row.y * next.y;
  }
}

}  // namespace nanovllm::decoder
