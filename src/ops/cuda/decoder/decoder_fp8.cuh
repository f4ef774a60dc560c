// E4M3 weights in the decoder layers' kernel, with scales of blocks of 128 x 128, and operands
// whose blocks of 128 of k are quantised where they are written; or both with scales of whole rows.
// By the definition of docs/contract.md, with the bits of quantise_rows.cuh and gemm_fp8.cuh. A
// mixture's router has plain weights, and the row as it is for an operand. int8 weights with scales
// of rows take the same way: their sums are integers until a tile ends.
//
// An atom is a block of k: 8 rows of 128 numbers, which are as many bytes as 64 of bf16. So tiles,
// stages and the ring are those of plain weights of half as many columns. Of one row alone, for
// more take longer than separate operations do: the operand is that row. Behind it are its scales,
// one for each block, or one and behind it what each warp has found to be the largest magnitude.
#pragma once

#include "ops/cuda/decoder/decoder_multiply.cuh"
#include "ops/cuda/ptx/e4m3.cuh"
#include "ops/cuda/ptx/wgmma_bytes.cuh"
#include "ops/cuda/quantised/quantised_rows.cuh"

namespace nanovllm::decoder {

constexpr int kBlock = kAtomRow;  // numbers of k

// -- Operands --

/// The rows of an operand: one, or both halves of k.
template <class Worker>
constexpr int kPlaces = Worker::kIsBeside ? 2 : 1;

/// The address of `column` and of those behind it in an aligned piece of up to 16.
template <class Worker>
__device__ __forceinline__ uint32_t number_at(const Worker& w, const MatrixCut& cut, int column,
                                              int place = 0) {
  const int at = Worker::kIsBeside ? column / 16 * 32 + place * 16 + column % 16 : column;
  return shared_address(w.operand) + cut.operand_at + at;
}
/// The operand's scales.
template <class Worker>
__device__ __forceinline__ uint32_t scale_at(const Worker& w, const MatrixCut& cut, int block) {
  return shared_address(w.operand) + cut.operand_at + cut.atoms * kBlock * kPlaces<Worker> +
         block * static_cast<int>(sizeof(float));
}
template <class Worker>
__device__ __forceinline__ void put_scale(const Worker& w, const MatrixCut& cut, int block,
                                          float scale) {
  store_shared(scale_at(w, cut, block), __float_as_uint(scale));
}
__device__ inline float load_scale(uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
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
__device__ inline uint32_t quantise_four(uint32_t first, uint32_t second, const Divisor& by) {
  const float2 a = unpack(first), b = unpack(second);
  return quantise_two(a.x, a.y, by) | quantise_two(b.x, b.y, by) << 16;
}
template <class Worker>
__device__ __forceinline__ uint32_t numbers_of(uint32_t first, uint32_t second, float scale) {
  if constexpr (Worker::kIntegers) {
    const float2 a = unpack(first), b = unpack(second);
    return integer_of(a.x, scale) | integer_of(a.y, scale) << 8 | integer_of(b.x, scale) << 16 |
           integer_of(b.y, scale) << 24;
  } else {
    return quantise_four(first, second, Divisor(scale));
  }
}

// Scales of whole rows: warps note what they have found, and behind a barrier all may ask.

/// By whole warps.
template <class Worker>
__device__ __forceinline__ void note_most(const Worker& w, const MatrixCut& cut, int warp,
                                          float most) {
  __syncwarp();
  most = most_of_lanes<kWarp>(most);
  if (threadIdx.x % kWarp == 0) put_scale(w, cut, 1 + warp, most);
}
/// The row's scale, of which the first `warps` have noted something. By whole warps.
template <class Worker>
__device__ __forceinline__ float noted_scale(const Worker& w, const MatrixCut& cut, int warps) {
  const int lane = threadIdx.x % kWarp;
  __syncwarp();
  const float most =
      most_of_lanes<kWarp>(lane < warps ? load_scale(scale_at(w, cut, 1 + lane)) : 0.0f);
  return Worker::kIntegers ? integer_scale(most) : row_scale(most);
}

// The norms' row. It lies in both places, so that every product has its second sums from the last.

template <class Worker>
__device__ __forceinline__ void put_eight(const Worker& w, const MatrixCut& cut, int column,
                                          const Packed& x, float scale) {
  if constexpr (Worker::kHasExperts) w.operand_at(w.a.cuts[kRouter], 0, column) = x;
  const uint32_t first = numbers_of<Worker>(x.pair[0], x.pair[1], scale),
                 second = numbers_of<Worker>(x.pair[2], x.pair[3], scale);
#pragma unroll
  for (int place = 0; place < kPlaces<Worker>; ++place)
    store_shared(number_at(w, cut, column, place), first, second);
}
/// The same with the scale of their block, of which sixteen lanes in a row have eight elements
/// each, and all of them come here.
template <class Worker>
__device__ __forceinline__ void put_block(const Worker& w, const MatrixCut& cut, int column,
                                          const Packed& x) {
  constexpr int kLanes = kBlock / 8;
  const unsigned half = threadIdx.x % kWarp / kLanes;
  const float scale = row_scale(most_of_lanes<kLanes>(most_of(x), 0xffffu << half * kLanes));
  put_eight(w, cut, column, x, scale);
  if (column % kBlock == 0) put_scale(w, cut, column / kBlock, scale);
}

/// normalise_held()'s end: `normal` is a thread's part of the row, where `present`; else zeros.
template <class Worker>
__device__ __forceinline__ void put_normal(const Worker& w, int row, int thread, bool present,
                                           const Packed& normal) {
  const MatrixCut& cut = w.a.cuts[kQkv];
  if constexpr (Worker::kHasTokens) {
    if (row == 0) note_most(w, cut, thread / kWarp, most_of(normal));
    w.norm_together();
    if (row > 0) return;
    const float scale = noted_scale(w, cut, w.a.norm_threads / kWarp);
    if (present) put_eight(w, cut, thread * 8, normal, scale);
    if (thread == 0) put_scale(w, cut, 0, scale);
  } else {
    if (present) put_block(w, cut, thread * 8, normal);
  }
}

/// add_and_normalise()'s end: `thread` is one of the row's, whose first weights are `first_weight`;
/// `has_row`: else it has no part in it.
template <class Worker>
__device__ __forceinline__ void put_normals(const Worker& w, const __nv_bfloat16* weights,
                                            const Packed& first_weight, bool has_row, int thread) {
  const Arguments& a = w.a;
  const MatrixCut& cut = a.cuts[kQkv];
  const int step = a.norm_threads * 8;
  const auto for_normals = [&](const auto& put) {
    const float reciprocal = reciprocal_of(w, 0);
    for (int c = thread * 8; c < a.hidden; c += step) {
      Packed x = *reinterpret_cast<const Packed*>(w.residual + c), weight = first_weight;
      if (c != thread * 8) weight = *reinterpret_cast<const Packed*>(weights + c);
      normalise(x, reciprocal, weight);
      put(c, x);
    }
  };
  if constexpr (Worker::kHasTokens) {
    if (has_row) {
      float most = 0.0f;
      for_normals([&](int, const Packed& x) { most = nanovllm::most_of(most, most_of(x)); });
      note_most(w, cut, thread / kWarp, most);
    }
    w.norm_together();
    if (has_row) {
      const float scale = noted_scale(w, cut, a.norm_threads / kWarp);
      for_normals([&](int c, const Packed& x) { put_eight(w, cut, c, x, scale); });
      if (thread == 0) put_scale(w, cut, 0, scale);
    }
  } else if (has_row) {
    for_normals([&](int c, const Packed& x) { put_block(w, cut, c, x); });
  }
}

// Words of other blocks.

/// Calls put(block, a lane's first two elements, its next two) of `blocks` blocks of 128
/// elements that lie in a row from `from` on; a warp asks for several of its own at once.
/// `is_sent`: else they are zeros.
template <class Put>
__device__ __forceinline__ void for_sent_blocks(const uint64_t* from, int blocks, int warp,
                                                int warps, uint32_t epoch, bool is_sent,
                                                const Put& put) {
  constexpr int kAtOnce = 6;
  const int lane = threadIdx.x % kWarp;
#pragma unroll 1
  for (int first = warp; first < blocks; first += kAtOnce * warps) {
    WordPair pair[kAtOnce] = {};
    uint32_t missing = 0;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (is_sent && first + j * warps < blocks) missing |= 1u << j;
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
  const int lane = thread % kWarp, warp = thread / kWarp, blocks = cut.atoms * kPlaces<Worker>,
            warps = (!Worker::kHasTokens && blocks <= kFew ? kGathering : kThreads) / kWarp;
  const uint64_t* from = inbox(w.a, sent);
  const bool is_sent = !(absent && w.shared.context[0] <= 0);
  const auto for_own = [&](const auto& use) {
    if (warp < warps) for_sent_blocks(from, blocks, warp, warps, w.epoch, is_sent, use);
  };
  const auto put = [&](int block, uint32_t low, uint32_t high, float scale) {
    const int half = Worker::kIsBeside && block >= cut.atoms;
    store_shared(number_at(w, cut, (block - half * cut.atoms) * kBlock + lane * 4, half),
                 numbers_of<Worker>(low, high, scale));
  };
  const auto most_of_both = [](uint32_t low, uint32_t high) {
    return nanovllm::most_of(most_of(low), most_of(high));
  };
  if constexpr (Worker::kHasTokens) {
    float most = 0.0f;
    for_own([&](int, uint32_t low, uint32_t high) {
      most = nanovllm::most_of(most, most_of_both(low, high));
    });
    note_most(w, cut, warp, most);
    w.together();
    const float scale = noted_scale(w, cut, warps);
    for_own([&](int block, uint32_t low, uint32_t high) { put(block, low, high, scale); });
    if (warp == 0 && lane == 0) put_scale(w, cut, 0, scale);
  } else {
    for_own([&](int block, uint32_t low, uint32_t high) {
      const float scale = row_scale(most_of_lanes<kWarp>(most_of_both(low, high)));
      put(block, low, high, scale);
      if (lane == 0) put_scale(w, cut, block, scale);
    });
  }
  fence_shared_for_async();
}

// -- Products --

/// Of a tile, the scales of a lane's outputs: with scales of blocks those of its warp's first eight
/// rows of w, and of the next eight (of gate and of up, or of both halves of k), for block `block`
/// of k; else of the lane's rows.
template <class Worker>
__device__ __forceinline__ float2 weight_scales(const Worker& w, const MatrixCut& cut, int product,
                                                int tile, int warp, int lane, int block) {
  constexpr int kElementsOfFloat = sizeof(float) / sizeof(__nv_bfloat16),
                kRows = Worker::kHasTokens ? 1 : 8;  // that share one
  if (block >= cut.atoms) return {};
  const bool gated = product == kGateUp, halves = Worker::kIsBeside && is_in_halves(w, product);
  int columns = cut.columns;  // of one half
  const float* first = w.a.scales[product];
  if (Worker::kHasExperts && gated) {
    const Mixture& m = w.a.mixture;
    const int of_token = tile / m.tiles;
    tile -= of_token * m.tiles;
    columns = m.tiles * cut.columns_of_tile;
    first += w.shared.chosen[of_token] * m.gate_up_scales;
  }
  // Behind the matrix a warp has rows that nobody needs.
  const int units = columns / kRows,
            in_tile = (gated || halves ? 8 : 16) * warp + (Worker::kHasTokens ? lane / 4 : 0),
            own = (tile * cut.columns_of_tile + in_tile) / kRows, unit = min(own, units - 1),
            next = gated    ? units
                   : halves ? cut.atoms * w.a.scale_stride[product]
                            : min(own + 8 / kRows, units - 1) - unit;
  const float* scales = first + w.layer * (w.a.layer_stride / kElementsOfFloat) +
                        int64_t{block} * w.a.scale_stride[product] + unit;
  return {__ldg(scales), __ldg(scales + next)};
}

/// sum += part; integers are there bit by bit.
__device__ inline void add_part(float& sum, float part) { sum += part; }
__device__ inline void add_part(float& sum, int part) {
  sum = __int_as_float(__float_as_int(sum) + part);
}

/// c += p(b) * (scale of the row * scale of w), or p(b), for the next blocks b of k, in ascending
/// order, whose atoms a lane each waits for (multiply_atoms()). Lane `from` + i has w's scales of
/// the i-th; where `from` is 0, they are still to be multiplied with the row's, at `of_row`, and of
/// the second half of k `to_second` bytes behind it. The second sums are of the last place.
template <int kAtoms, class Worker>
__device__ __forceinline__ void multiply_blocks(const Worker& w, const MatrixCut& cut, Progress& p,
                                                int lane, float2& scales, int from, uint32_t of_row,
                                                int to_second, bool waits, bool last, Sums& c) {
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
  constexpr uint32_t kStepOfX = 2 * kPlaces<Worker>;
  constexpr int kSecond = kPlaces<Worker> + 1;
  uint32_t x = __shfl_sync(kFullMask, p.x, 0);  // known to be the same in all lanes
  p.x += 4 * kAtoms * kStepOfX;
  std::conditional_t<Worker::kIntegers, int, float> part[kAtoms][1][4];  // as Sums
  constexpr int kUnderway = Worker::kHasExperts ? std::min(kAtoms, 4) : kAtoms;
  wgmma_fence();
  const auto start = [&]<int i>() {
    byte_product<8, false>(part[i][0], tile_at(atoms[i]), x);
#pragma unroll
    for (int step = 1; step < 4; ++step)
      byte_product<8, true>(part[i][0], tile_at(atoms[i]) + 2 * step, x + step * kStepOfX);
    x += 4 * kStepOfX;
    wgmma_commit();
  };
  [&]<int... i>(std::integer_sequence<int, i...>) { (start.template operator()<i>(), ...); }
  (std::make_integer_sequence<int, kUnderway>());
  if (!Worker::kHasTokens && from == 0) {
    const float row = load_scale(of_row),
                next = Worker::kIsBeside ? load_scale(of_row + to_second) : row;
    scales = {row * scales.x, next * scales.y};
  }
  // Scales are shuffled before any block is waited for: behind a wait each shuffle would take as
  // long as two wgmma.
  float2 scale[kAtoms];
  if constexpr (!Worker::kHasTokens) {
#pragma unroll
    for (int i = 0; i < kAtoms; ++i) {
      scale[i] = {__shfl_sync(kFullMask, scales.x, from + i),
                  __shfl_sync(kFullMask, scales.y, from + i)};
      find_now(scale[i]);
    }
  }
  // The row is the first column: of the first lane in four, in every second sum. All but the last
  // block are waited for together.
  const auto add = [&]<int i>() {
    constexpr bool kTogether = kUnderway == kAtoms, kLast = i == kAtoms - 1;
    if constexpr (!kTogether || kLast || i == 0)
      wgmma_wait<kTogether ? !kLast : std::min(kUnderway, kAtoms - i) - 1>();
    pin(part[i]);
    if constexpr (Worker::kHasTokens) {
      add_part(c[0][0], part[i][0][0]);
      add_part(c[0][2], part[i][0][2]);
    } else {
      c[0][0] = fmaf(part[i][0][0], scale[i].x, c[0][0]);
      c[0][2] = fmaf(part[i][0][kSecond], scale[i].y, c[0][2]);
    }
    if constexpr (i + kUnderway < kAtoms) start.template operator()<i + kUnderway>();
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

/// multiply() of E4M3 numbers. `next`: the lane's first weight_scales(), which come from memory.
template <class Worker>
__device__ __forceinline__ void multiply_fp8(const Worker& w, const Ring& ring,
                                             const MatrixCut& cut, int product, int tile, int warp,
                                             int lane, float2 next, Sums& c) {
  Progress p{ring, describe_operand(kPlaces<Worker>, shared_address(w.operand) + cut.operand_at),
             0};
  const auto scales = [&](int block) {
    return weight_scales(w, cut, product, tile, warp, lane, block);
  };
  constexpr bool kHalves = !Worker::kHasTokens && !Worker::kHasExperts && !Worker::kIsBeside;
  const int to_second = is_in_halves(w, product) ? cut.atoms * static_cast<int>(sizeof(float)) : 0;
  float2 now{};
#pragma unroll 1
  for (int done = 0; done < cut.atoms;) {
    if (!Worker::kHasTokens && done % kWarp == 0) now = next, next = scales(done + kWarp + lane);
    const int left = cut.atoms - done, of_second = kHalves ? cut.second_atoms : 0,
              of_chain = left > of_second ? left - of_second : left;
    if (kHalves && left == of_second) {
      keep_first_half(w, c);
      c[0][0] = c[0][2] = 0.0f;
    }
    const auto run = [&]<int kAtoms>() {
      multiply_blocks<kAtoms>(w, cut, p, lane, now, done % kWarp,
                              scale_at(w, cut, min(done + lane, cut.atoms - 1)), to_second,
                              tile == blockIdx.x && done == 0, left == kAtoms, c);
      done += kAtoms;
    };
    if (!Worker::kIsHigh && of_chain >= 8 && done % 8 == 0 && !cut.streams &&
        done >= cut.fine_atoms)
      run.template operator()<8>();
    else if (of_chain >= 4 && done % 4 == 0)  // a warp's scales are of 32 blocks from a multiple on
      run.template operator()<4>();
    else
      run.template operator()<1>();
  }
  if (kHalves && cut.second_atoms > 0) add_first_half(w, c);
  if (Worker::kIsBeside) c[0][3] = c[0][2];
  if constexpr (Worker::kHasTokens) {
    const float row = load_scale(scale_at(w, cut, 0));
    if constexpr (Worker::kIntegers)
      for (int i = 0; i < 4; i += 2) c[0][i] = static_cast<float>(__float_as_int(c[0][i]));
    c[0][0] *= row * next.x;
    c[0][2] *= row * next.y;
  }
}

}  // namespace nanovllm::decoder
