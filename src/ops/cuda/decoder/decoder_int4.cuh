// Packed int4 weights in the decoder layers' kernel, of groups of 128 columns or more: records
// (quantised/packed.h) stream through the ring as they are stored, and are unpacked in the
// registers of the warps that multiply. One chain over k, or one for both halves of it; the bits of
// gemm_packed.cuh. Scales of few bits without zero points (of no CudaBackend::fine_) unpack in
// fewer instructions than others.
//
// 128 columns take a lone warp some 300 cycles, of 8 rows as of 16; eight steps of the chain and
// its instructions' own delays add up to 210 and 235. So as many warps multiply as a tile has pairs
// of eights: three in a quarter of the SM take some 720 cycles, where memory takes 930.
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

/// Of any scale that Unpack<int4> takes. Here a pair's numbers become (q - zero) / 64 first.
struct FineUnpack {
  uint32_t high, low, zero;  // 64 times the scale's upper bits, the others; -zero / 64
  FineUnpack() = default;
  __device__ explicit FineUnpack(uint32_t word) {
    constexpr float k64 = 64.0f;
    const float upper = __uint_as_float(word & 0xffff0000u),
                lower = __uint_as_float(word & 0xffffff00u) - upper;
    const auto both = [](float x) { return __byte_perm(__float_as_uint(x), 0, 0x3232); };
    high = both(upper * k64);
    low = both(lower * k64);
    zero = of_pair(__hfma2(as_pair(__byte_perm(word, 0x43, 0x4040)), as_pair(0xbc80bc80u),
                           as_pair(0x40004000u)));
  }
  __device__ uint32_t pair(uint32_t word, uint32_t mask, uint32_t unit) const {
    const __nv_bfloat162 q = __hfma2(as_pair(word & mask), as_pair(unit), as_pair(zero));
    return of_pair(__hfma2(as_pair(high), q, __hmul2(as_pair(low), q)));
  }
  /// A lane's part of two steps, in four pairs.
  __device__ void operator()(uint32_t (&to)[4], uint32_t word, uint32_t) const {
#pragma unroll
    for (int i = 0; i < 2; ++i, word >>= 8) {
      to[2 * i] = pair(word, 0x000f000fu, 0x7f007f00u);
      to[2 * i + 1] = pair(word, 0x00f000f0u, 0x7d007d00u);
    }
  }
};

/// `coarse`: of a CoarseUnpack. `kExperts`: of a mixture, whose router has plain weights.
/// `kSingle`: has_single_row().
template <int kHeadDim, bool coarse, bool kExperts, bool kSingle>
struct Int4Worker : Worker<kHeadDim> {
  static constexpr bool kIsInt4 = true, kHasExperts = kExperts, kHasSingleRow = kSingle;
  // O and down of more than four rows have two.
  static constexpr int kSums = kExperts || kSingle ? 1 : 2;
  using UnpackNumbers = std::conditional_t<coarse, CoarseUnpack, FineUnpack>;
  __device__ int multiplying(int product) const { return this->a.cuts[product].warps; }
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
  return !gated && !cut.beside && cut.groups <= kMultiplying && !cut.bias;
}

/// has_ended(), where it `matters`.
__device__ __forceinline__ bool has_come(uint64_t* barrier, uint32_t parity, bool matters) {
  uint32_t come;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 q, %3, 0;\nsetp.eq.u32 p, %3, 0;\n"
      "@q mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(come)
      : "r"(shared_address(barrier)), "r"(parity), "r"(uint32_t{matters})
      : "memory");
  return come != 0;
}

/// The records of a tile, a chunk at a time, of a warp's rows. A lane. `kUnits`: eights of rows, of
/// gate and of up, of both halves of k, or neighbours. It has no branches, before which the
/// compiler would wait for products.
template <int kUnits>
struct RecordReader {
  Ring ring;
  uint32_t from;                               // the next chunk's start
  uint32_t of_lane[kUnits], of_scale[kUnits];  // from there to a lane's numbers, its scale
  int of_stage, left, chunks;  // of a stage; of this one and of the tile, not asked for
  uint4 words[kUnits];
  uint32_t scales[kUnits];

  /// `first`: bytes of a stage before the warp's first unit; `next`: from that to its second.
  __device__ __forceinline__ RecordReader(const Ring& of_tile, const MatrixCut& cut, int first,
                                          int next, int lane)
      : ring(of_tile),
        of_stage(chunks_of_stage(cut)),
        chunks(cut.atoms * kAtomDepth / kPackedColumns) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      of_lane[u] = first + u * next + lane * 16;
      of_scale[u] = first + u * next + packed_number_bytes(WeightFormat::int4) + lane / 4 * 4;
      find_now(of_lane[u]);
      find_now(of_scale[u]);
    }
    from = start_of(ring.next.stage);
    left = min(of_stage, chunks);
  }
  __device__ __forceinline__ uint32_t start_of(int stage) const {
    return shared_address(ring.data) + stage * kStageBytes;
  }
  /// Asks for the next chunk; behind the last one, for whatever lies there.
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[u].x), "=r"(words[u].y), "=r"(words[u].z), "=r"(words[u].w)
                   : "r"(from + of_lane[u])
                   : "memory");
      asm volatile("ld.shared.u32 %0, [%1];"
                   : "=r"(scales[u])
                   : "r"(from + of_scale[u])
                   : "memory");
    }
  }
  /// To the chunk behind; whether it is there, if there is one. `ended`: the stage `stage` is read.
  __device__ __forceinline__ bool advance(bool& ended, int& stage) {
    --chunks;
    ended = --left == 0;
    stage = ring.next.stage;
    RingCursor later = ring.next;
    later.next(ring.stages);
    ring.next.stage = ended ? later.stage : stage;
    ring.next.parity = ended ? later.parity : ring.next.parity;
    from = ended ? start_of(later.stage) : from + kRecordBytes;
    left = ended ? min(of_stage, chunks) : left;
    return has_come(&ring.full[ring.next.stage], ring.next.parity, ended && chunks > 0);
  }
};

/// multiply() of records by an operand of `places` columns, 8 for each of the sums, from `first` on
/// as RecordReader has it. mma.sync, where wgmma wants fences, lets instructions stand between a
/// chain's steps: while two steps are multiplied the next two are unpacked. Of kPlaces, if not 0,
/// addresses in the operand are known to the compiler: one that moves on waits for the load before.
template <int kUnits, int kPlaces, int kSums, class Worker>
__device__ __forceinline__ void multiply_records(const Worker& w, const Ring& ring,
                                                 const MatrixCut& cut, int first, int next,
                                                 int places, int lane, bool waits,
                                                 uint32_t releases, float (&c)[kSums][4]) {
  RecordReader<kUnits> reader(ring, cut, first, next, lane);
  using UnpackNumbers = typename Worker::UnpackNumbers;
  UnpackNumbers unpacks[kUnits];
  uint4 words[kUnits];
  uint32_t a[2][2][4] = {}, x[2][kSums][4];  // of two steps of tensor cores each
  const uint32_t step = 4 * 16 * (kPlaces > 0 ? kPlaces : places);
  uint32_t from = shared_address(w.operand) + cut.operand_at + (lane / 8 * places + lane % 8) * 16;
  const auto load_x = [&](uint32_t(&to)[kSums][4], int quarter) {
#pragma unroll
    for (int s = 0; s < kSums; ++s) load_matrices(to[s], from + quarter * step + s * 8 * 16);
  };
  const auto unpack = [&]<int quarter>() {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (quarter == 0) unpacks[u] = UnpackNumbers(reader.scales[u]), words[u] = reader.words[u];
      const uint32_t word = word_of(words[u], quarter);
      uint32_t pairs[4];
      unpacks[u](pairs, word, word);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        a[quarter % 2][i][u] = pairs[2 * i];
        a[quarter % 2][i][u + 2] = pairs[2 * i + 1];
      }
    }
  };
  const auto multiply = [&](int turn) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int s = 0; s < kSums; ++s)
        mma_m16n8k16(c[s], a[turn][i], x[turn][s][2 * i], x[turn][s][2 * i + 1]);
  };
  bool ended = false;
  int stage = 0;
  // Products between a stage's last numbers and this have brought the lanes together.
  const auto release = [&] {
    if (ended && lane == 0) ring.release({stage, 0}, releases);
  };
  ring.wait_full(ring.place());
  reader.load();
  bool ready = reader.advance(ended, stage);
  unpack.template operator()<0>();
  if (waits) w.take_operand();
  load_x(x[0], 0);
  __syncwarp();
  release();
#pragma unroll 1
  do {
    if (__builtin_expect(!ready, 0)) reader.ring.wait_full(reader.ring.next);
    load_x(x[1], 1);
    reader.load();
    unpack.template operator()<1>();
    multiply(0);
    load_x(x[0], 2);
    unpack.template operator()<2>();
    multiply(1);
    ready = reader.advance(ended, stage);
    load_x(x[1], 3);
    unpack.template operator()<3>();
    multiply(0);
    release();
    from += 4 * step;
    find_now(from);
    load_x(x[0], 0);
    unpack.template operator()<0>();
    multiply(1);
  } while (reader.chunks >= 0);
}

/// The first of them.
template <int kSums>
__device__ __forceinline__ Sums& first_of(float (&sums)[kSums][4]) {
  return reinterpret_cast<Sums&>(sums[0]);
}

/// Of a product in halves of k a warp's 16 rows of A are an eight's of the first half and the same
/// of the second, B's columns the halves of x's rows in turns: of each row of x one column meets
/// the first eight and the next the second, in one chain (add_halves()).
template <class Worker>
__device__ __forceinline__ void multiply_int4(const Worker& w, const Ring& ring,
                                              const MatrixCut& cut, bool gated, int warp, int lane,
                                              bool waits, float (&c)[Worker::kSums][4]) {
  // A warp without rows does another's work again.
  const int of_unit = chunks_of_stage(cut) * kRecordBytes, half = cut.groups / 2,
            places = w.places(cut);
  const uint32_t releases = warp == 0 ? kWarps - cut.warps + 1 : 1;  // kWarps of all
  const bool paired = gated || cut.beside;
  const auto go = [&]<int kUnits, int kPlaces>(auto& sums) {
    const int first = min(paired ? warp : warp * kUnits, (paired ? half : cut.groups) - 1),
              next = paired ? first + half : min(first + 1, cut.groups - 1);
    multiply_records<kUnits, kPlaces>(w, ring, cut, first * of_unit, (next - first) * of_unit,
                                      places, lane, waits, releases, sums);
  };
  if (is_narrow(cut, gated)) {
    if (Worker::kHasSingleRow || places == 1)
      go.template operator()<1, 1>(first_of(c));
    else
      go.template operator()<1, 0>(first_of(c));
  } else if (places == 1) {
    go.template operator()<2, 1>(first_of(c));
  } else if (Worker::kHasSingleRow || places == 2) {
    go.template operator()<2, 2>(first_of(c));
  } else if (places <= 8) {
    go.template operator()<2, 0>(first_of(c));
  } else {
    go.template operator()<2, 0>(c);
  }
}

/// multiply_experts() of records, whose operand other warps have written.
template <class Worker>
__device__ __forceinline__ void multiply_int4_experts(const Worker& w, const Ring& ring,
                                                      const MatrixCut& cut, int first, int warp,
                                                      int lane, float (*sums)[64]) {
  Sums c = {};
  multiply_records<2, 0>(w, ring, cut, warp * kExpertBytes, chunks_of_stage(cut) * kRecordBytes,
                         kMostChosen, lane, false, kWarps / kMultiplying, c);
  put_expert(sums, first + warp, lane, c);
}

// -- On the host --

/// The kernel of all layers. C: of the cache's elements.
template <int kHeadDim, class C>
Kernel* int4_kernel(const Arguments& a);

/// Whether f(weight, its halves) holds for all weights of all layers.
template <class F>
bool all_weights(const DecoderStack& stack, const F& f) {
  return std::ranges::all_of(stack.layers, [&](const DecoderWeights& w) {
    return f(w.qkv, 1) && f(w.o, 1) && f(w.gate_up, 2) && f(w.down, 1);
  });
}

/// The part of the arguments that int4 weights give, `layer_stride` bytes from a layer's to the
/// next one's; false where the kernel does not fit them.
bool describe_int4(Arguments& a, EncodeMap encoder, const DecoderStack& stack, int64_t layer_stride,
                   int blocks);

}  // namespace nanovllm::decoder
