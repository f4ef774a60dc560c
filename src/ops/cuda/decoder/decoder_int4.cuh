// Packed int4 weights in the decoder layers' kernel, of groups of 128 columns or more: records
// (quantised/packed.h) stream through the ring as they are stored, and are unpacked in the
// registers of the warps that multiply. One chain over k, the bits of gemm_packed.cuh. Scales of
// few bits without zero points (of no CudaBackend::fine_) unpack in fewer instructions than others.
//
// Each of these four warps has a quarter of the SM to itself, and its instructions bind: it takes
// 340 cycles for 128 columns of 16 rows, 285 for 8, where memory takes up to 311.
#pragma once

#include <algorithm>
#include <climits>

#include "ops/backend.h"
#include "ops/cuda/decoder/decoder_cut.cuh"
#include "ops/cuda/decoder/decoder_multiply.cuh"
#include "ops/cuda/ptx/tensor_map.h"
#include "ops/cuda/quantised/packed.cuh"

namespace nanovllm::decoder {

constexpr int kRecordBytes =
    packed_record_bytes({WeightFormat::int4, kPackedColumns}, 2 * int64_t{kPackedColumns});
constexpr int kMapUnit = 8;  // bytes of what the copy engine takes for elements of a record

/// `coarse`: of a CoarseUnpack. `kExperts`: of a mixture, whose router has plain weights.
template <int kHeadDim, bool coarse, bool kExperts>
struct Int4Worker : Worker<kHeadDim> {
  static constexpr bool kIsInt4 = true, kHasExperts = kExperts;
  using UnpackNumbers = UnpackOf<WeightFormat::int4, coarse>;
};

// -- Copies --

/// Chunks of k in a stage.
__host__ __device__ constexpr int chunks_of_stage(const MatrixCut& cut) {
  return cut.stage_atoms * kAtomDepth / kPackedColumns;
}

/// bring_tile() of records.
__device__ inline void bring_records(Ring& ring, const CUtensorMap* map, const MatrixCut& cut,
                                     int row, int layer, int calm, int most, int later) {
  const int chunks = chunks_of_stage(cut);
  for (int i = 0; i < cut.stages; ++i, --calm) {
    const RingCursor place = ring.claim(calm > 0 ? most : later);
    arrive_expecting(&ring.full[place.stage], cut.groups * chunks * kRecordBytes);
    copy_box_once(ring.at(place), map, &ring.full[place.stage], 0, i * chunks, row / kPackedRows, 0,
                  layer);
  }
}

// -- Products --

/// Whether each warp has one eight of rows of a tile, and not two.
__device__ __forceinline__ bool is_narrow(const MatrixCut& cut, bool gated) {
  return !gated && cut.groups <= kMultiplying && !cut.bias;
}

/// The records of a tile, half a chunk at a time, of a warp's rows. A lane. `kUnits`: eights of
/// rows, of gate and of up, or neighbours.
template <int kUnits>
struct RecordReader {
  Ring ring;
  const MatrixCut& cut;
  int unit_bytes, to_scale;  // from a lane's first unit to its next; from its numbers to the scale
  uint32_t of_lane, from;    // in the first stage; this chunk's
  int left = 0, chunks;      // of the stage, of the tile
  uint2 words[2][kUnits];    // of both halves of a chunk
  uint32_t scales[kUnits];

  /// `first`: bytes of a stage before the warp's first unit; `next`: from that to its second.
  __device__ __forceinline__ RecordReader(const Ring& of_tile, const MatrixCut& matrix, int first,
                                          int next, int lane)
      : ring(of_tile),
        cut(matrix),
        unit_bytes(next),
        to_scale(packed_number_bytes(WeightFormat::int4) + lane / 4 * 4 - lane * 16),
        of_lane(shared_address(ring.data) + first + lane * 16),
        chunks(matrix.atoms * kAtomDepth / kPackedColumns) {}
  /// To the first chunk of the next stage.
  __device__ __forceinline__ void take_stage() {
    const RingCursor place = ring.place();
    ring.wait_full(place);
    from = of_lane + place.stage * kStageBytes;
    left = chunks_of_stage(cut);
  }
  /// Asks for half of a chunk; with the first one, for the scales.
  template <int half>
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                   : "=r"(words[half][u].x), "=r"(words[half][u].y)
                   : "r"(from + u * unit_bytes + half * 8)
                   : "memory");
      if (half == 0)
        asm volatile("ld.shared.u32 %0, [%1];"
                     : "=r"(scales[u])
                     : "r"(from + u * unit_bytes + to_scale)
                     : "memory");
    }
  }
  /// To the next chunk; behind the last one, to whatever lies there.
  __device__ __forceinline__ void advance() {
    from += kRecordBytes;
    --chunks;
    if (__builtin_expect(--left > 0 && chunks > 0, 1)) return;
    __syncwarp();
    if (threadIdx.x % kWarp == 0) ring.release(ring.place(), kWarps / kMultiplying);
    ring.advance();
    if (chunks > 0) take_stage();
  }
};

/// multiply() of records by `rows` rows of the operand, from `first` on as RecordReader has it.
/// Instructions of these warps bind, one each in a quarter of the SM: mma.sync lets them stand
/// between its steps, where wgmma wants fences.
template <int kUnits, class Worker>
__device__ __forceinline__ void multiply_records(const Worker& w, const Ring& ring,
                                                 const MatrixCut& cut, int first, int next,
                                                 int rows, int lane, bool waits, Sums& c) {
  RecordReader<kUnits> reader(ring, cut, first, next, lane);
  using UnpackNumbers = typename Worker::UnpackNumbers;
  UnpackNumbers unpacks[kUnits];
  const auto take_scales = [&] {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) unpacks[u] = UnpackNumbers(reader.scales[u]);
  };
  uint32_t x[2][4];  // of two steps of tensor cores each
  uint32_t from = shared_address(w.operand) + cut.operand_at + (lane / 8 * rows + lane % 8) * 16;
  const auto load_x = [&](uint32_t(&to)[4]) {
    load_matrices(to, from);
    from += 4 * 16 * rows;
  };
  const auto multiply_quarter = [&]<int quarter>(const uint32_t(&of_x)[4]) {
    uint32_t a[2][4] = {};
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const uint2 half = reader.words[quarter / 2][u];
      const uint32_t word = quarter % 2 == 0 ? half.x : half.y;
      uint32_t pairs[4];
      unpacks[u](pairs, word, word);
#pragma unroll
      for (int i = 0; i < 2; ++i) a[i][u] = pairs[2 * i], a[i][u + 2] = pairs[2 * i + 1];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) mma_m16n8k16(c[0], a[i], of_x[2 * i], of_x[2 * i + 1]);
  };
  reader.take_stage();
  reader.template load<0>();
  if (waits) w.take_operand();
  load_x(x[0]);
#pragma unroll 1
  do {
    take_scales();
    load_x(x[1]);
    reader.template load<1>();
    multiply_quarter.template operator()<0>(x[0]);
    load_x(x[0]);
    multiply_quarter.template operator()<1>(x[1]);
    load_x(x[1]);
    reader.advance();
    reader.template load<0>();
    multiply_quarter.template operator()<2>(x[0]);
    load_x(x[0]);
    multiply_quarter.template operator()<3>(x[1]);
  } while (reader.chunks > 0);
}

template <class Worker>
__device__ __forceinline__ void multiply_int4(const Worker& w, const Ring& ring,
                                              const MatrixCut& cut, bool gated, int warp, int lane,
                                              bool waits, Sums& c) {
  // A warp without rows does another's work again.
  const int of_unit = chunks_of_stage(cut) * kRecordBytes, half = cut.groups / 2;
  const auto go = [&]<int kUnits>() {
    const int first = min(gated ? warp : warp * kUnits, (gated ? half : cut.groups) - 1),
              next = gated ? first + half : min(first + 1, cut.groups - 1);
    multiply_records<kUnits>(w, ring, cut, first * of_unit, (next - first) * of_unit, w.rows(),
                             lane, waits, c);
  };
  if (is_narrow(cut, gated))
    go.template operator()<1>();
  else
    go.template operator()<2>();
}

/// multiply_experts() of records, whose operand other warps have written.
template <class Worker>
__device__ __forceinline__ void multiply_int4_experts(const Worker& w, const Ring& ring,
                                                      const MatrixCut& cut, int first, int warp,
                                                      int lane, float (*sums)[64]) {
  Sums c = {};
  multiply_records<2>(w, ring, cut, warp * kExpertBytes, chunks_of_stage(cut) * kRecordBytes,
                      kMostChosen, lane, false, c);
  const int expert = first + warp;
  if (lane % 4 != expert / 2) return;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    sums[expert][half * 8 + lane / 4] = expert % 2 ? c[0][2 * half + 1] : c[0][2 * half];
}

// -- On the host --

/// The kernel of all layers. C: of the cache's elements. `coarse`: all weights are.
template <int kHeadDim, class C>
Kernel* int4_kernel(bool mixture, bool coarse);

/// Whether f(weight, its halves) holds for all weights of all layers.
template <class F>
bool all_weights(const DecoderStack& stack, const F& f) {
  return std::ranges::all_of(stack.layers, [&](const DecoderWeights& w) {
    return f(w.qkv, 1) && f(w.o, 1) && f(w.gate_up, 2) && f(w.down, 1);
  });
}

/// The part of the arguments that int4 weights give, `layer_stride` bytes from a layer's to the
/// next one's; false where the kernel does not fit them. Ranks might differ in whether registers
/// unpack their parts of a weight.
bool describe_int4(Arguments& a, EncodeMap encoder, const DecoderStack& stack, int64_t layer_stride,
                   int blocks);

}  // namespace nanovllm::decoder
