// y[m, n] = x[m, k] w[n, k]^T for up to some hundred rows and a packed weight (packed.cuh), on
// sm_90: the weight streams through shared memory as it is stored, and becomes bf16 in registers.
//
// Floor: the stored bytes over the memory's bandwidth; k / 16 dependent tensor core steps of 13
// cycles, or half as many as x has rows; and, for each pair of numbers, two instructions of 4 bits
// whose scales are coarse (CoarseUnpack), five of others, eight of 8 bits. The weight's rows are
// wgmma's A, in registers, 16 to a warp or 8, where that gives more SMs a part; the rows of x are
// B: one chain of k16 steps from zero, the bits of gemm_in_order. Some warps issue bulk copies into
// a ring of stages of 128 columns or 256; groups of four multiply, and prepare the next numbers
// while they do, or in turns (gemm_packed_turns.cuh). Of a weight in halves of k each block of a
// cluster has one (half_sums.cuh).
#pragma once

#include "ops/cuda/gemm/gated.cuh"
#include "ops/cuda/gemm/gemm_skinny.cuh"
#include "ops/cuda/gemm/half_sums.cuh"
#include "ops/cuda/quantised/packed.cuh"

namespace nanovllm {

struct PackedShape {
  int rows, columns;         // of y
  int64_t stride;            // of y's rows
  int block_rows;            // of x that a tile has: a multiple of 8
  int row_blocks;            // that cover all rows
  int warps;                 // of a block that have rows of w
  int units, up;             // eights of y's columns; of w's rows from a gate to its up, or 0
  int items;                 // tiles of y
  int record_bytes;          // of eight rows of w by 128 columns
  int groups;                // PackedLayout::groups
  int depth;                 // chunks in a stage: 1 or 2
  int steps, stages;         // stages that cover a block's part of k; of the ring
  int cluster;               // blocks that have a part of k each: 1, or 2 (HalfSums)
  int x_bytes, stage_bytes;  // of a stage
  bool in_turns;             // gemm_packed_turns.cuh
};

/// The numbers of a weight, and how registers unpack them. `one_group`: of a record, whose code
/// then has no branches, around which the compiler would wait for products.
template <WeightFormat::Numbers numbers, bool coarse, bool one_group>
struct PackedKind {
  static constexpr WeightFormat::Numbers kNumbers = numbers;
  static constexpr bool kOneGroup = one_group;
  using Unpacker = UnpackOf<numbers, coarse>;
  __device__ static int groups(const PackedShape& shape) { return one_group ? 1 : shape.groups; }
};

constexpr int kMapUnit = 8;  // bytes of what the copy engine takes for elements of w
constexpr int kPackedSlices = kPackedColumns / kSliceWidth;
static_assert(kPackedCopiers ==
              kGroupThreads / kWarp);  // registers are given to four warps at once

constexpr int kPackedBarriers = kSkinnyBarrierBytes + 2 * 8;  // bytes: the ring's, HalfSums's
/// Shared memory, as skinny_shared_bytes(): B reads kRows rows, whatever there are.
constexpr int packed_shared_bytes(int rows, int block_rows, int stage_bytes, int stages) {
  return kPackedBarriers + 1024 + stages * stage_bytes + (rows - block_rows) * kSliceRowBytes;
}

/// How the copy engine sees a weight, or a stack of them: [matrices, halves, eights of rows,
/// bytes], in boxes of `units` eights of each half of a matrix by `bytes`.
inline CUtensorMap map_records(EncodeMap encode, const Weight& w, const PackedLayout& layout,
                               int halves, int units, int bytes) {
  const int64_t row = int64_t{layout.columns} * layout.record_bytes,
                rows = layout.n / kPackedRows / halves;
  const bool is_stack = w.data.rank == 3;
  const int64_t matrices = is_stack ? w.data.shape[0] : 1,
                matrix = is_stack ? w.data.stride[0] * static_cast<int64_t>(sizeof(bf16))
                                  : row * rows * halves;
  CUtensorMap map{};
  const CUresult status = encode_map<4>(
      encode, map, w.data.data, {row / kMapUnit, rows, halves, matrices}, {row, row * rows, matrix},
      {bytes / kMapUnit, units, halves, 1}, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_DATA_TYPE_INT64, CU_TENSOR_MAP_SWIZZLE_NONE);
  check(status == CUDA_SUCCESS, ErrorKind::engine, "CUDA: no tensor map of {} (error {})",
        w.data.describe(), static_cast<int>(status));
  return map;
}

// -- c += A B; A in registers --

#define NANOVLLM_PRODUCT(n, count, a_places, b_place, ...)                                      \
  __device__ __forceinline__ void packed_product_n##n(float* d, const uint32_t(&a)[4],          \
                                                      uint32_t b) {                             \
    asm volatile("{\n.reg .b64 b;\nmov.b64 b, {" b_place                                        \
                 ", 0x40000040};\n"                                                             \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" NANOVLLM_D##count \
                 "}, {" a_places "}, b, 1, 1, 1, 0;\n}"                                         \
                 : __VA_ARGS__                                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));                         \
  }
NANOVLLM_PRODUCT(16, 8, "%8, %9, %10, %11", "%12", NANOVLLM_8("+f", d, 0))
NANOVLLM_PRODUCT(24, 12, "%12, %13, %14, %15", "%16", NANOVLLM_8("+f", d, 0),
                 NANOVLLM_4("+f", d, 8))
NANOVLLM_PRODUCT(32, 16, "%16, %17, %18, %19", "%20", NANOVLLM_16("+f", d, 0))
NANOVLLM_PRODUCT(48, 24, "%24, %25, %26, %27", "%28", NANOVLLM_16("+f", d, 0),
                 NANOVLLM_8("+f", d, 16))
NANOVLLM_PRODUCT(64, 32, "%32, %33, %34, %35", "%36", NANOVLLM_32("+f", d, 0))
NANOVLLM_PRODUCT(96, 48, "%48, %49, %50, %51", "%52", NANOVLLM_32("+f", d, 0),
                 NANOVLLM_16("+f", d, 32))
NANOVLLM_PRODUCT(128, 64, "%64, %65, %66, %67", "%68", NANOVLLM_64("+f", d, 0))
#undef NANOVLLM_PRODUCT

template <int n>
__device__ __forceinline__ void packed_product(float* d, const uint32_t (&a)[4], uint32_t b) {
  static_assert(n == 16 || n == 24 || n == 32 || n == 48 || n == 64 || n == 96 || n == 128);
  if constexpr (n == 16) packed_product_n16(d, a, b);
  if constexpr (n == 24) packed_product_n24(d, a, b);
  if constexpr (n == 32) packed_product_n32(d, a, b);
  if constexpr (n == 48) packed_product_n48(d, a, b);
  if constexpr (n == 64) packed_product_n64(d, a, b);
  if constexpr (n == 96) packed_product_n96(d, a, b);
  if constexpr (n == 128) packed_product_n128(d, a, b);
}

// -- Copies --

/// The tiles of a block, or of a cluster: this one, and as many as run at once further on.
__device__ inline int first_packed_item(const PackedShape& shape) {
  return static_cast<int>(blockIdx.x) >> (shape.cluster - 1);
}
__device__ inline int packed_items_at_once(const PackedShape& shape) {
  return static_cast<int>(gridDim.x) >> (shape.cluster - 1);
}

/// `in_turns`: rows of x have barriers of their own, behind those of the records.
template <bool in_turns>
struct PackedRing : StageRing {
  static constexpr bool kInTurns = in_turns;
  __device__ uint64_t* rows_full() const { return in_turns ? full + kMostTurnStages : full; }
};

/// A stage, the tile that it is for, and its place among those that cover k.
struct PackedCursor : RingCursor {
  int item, part, step = 0;
  __device__ explicit PackedCursor(const PackedShape& shape)
      : item(first_packed_item(shape)), part(static_cast<int>(cluster_rank()) * shape.steps) {}
  __device__ bool done(const PackedShape& shape) const { return item >= shape.items; }
  __device__ void next(const PackedShape& shape) {
    ++part;
    if (++step == shape.steps) step = 0, part -= shape.steps, item += packed_items_at_once(shape);
    RingCursor::next(shape.stages);
  }
};

/// The first eight rows of w of a block's, in the tile of `item`.
template <int kUnits>
__device__ int packed_unit(const PackedShape& shape, int item) {
  return item / shape.row_blocks * shape.warps * (shape.up > 0 ? 1 : kUnits);
}
/// The first row of x in the tile of `item`.
__device__ inline int packed_first_row(const PackedShape& shape, int item) {
  return item % shape.row_blocks * shape.block_rows;
}
/// Where unit i of warp `warp` is among a block's: [2, warps] where gated, else [warps, kUnits].
template <int kUnits>
__device__ int packed_slot(const PackedShape& shape, int warp, int i) {
  return shape.up > 0 ? i * shape.warps + warp : warp * kUnits + i;
}
/// A lane's row of w of those.
template <int kUnits>
__device__ int packed_row(const PackedShape& shape, int item, int warp, int i) {
  const bool gated = shape.up > 0;
  const int unit =
      packed_unit<kUnits>(shape, item) + (gated ? warp : packed_slot<kUnits>(shape, warp, i));
  return (min(unit, shape.units - 1) + (gated ? i * shape.up : 0)) * kPackedRows +
         static_cast<int>(threadIdx.x) % kWarp / 4;
}

template <int kUnits, class Ring>
__device__ void copy_packed(const CUtensorMap& w, const PackedShape& shape, const Ring& ring,
                            const PackedCursor& at) {
  uint64_t* barrier = ring.full + at.stage;
  const int row = shape.depth * shape.record_bytes, bytes = shape.warps * kUnits * row;
  if (Ring::kInTurns) arrive_expecting(ring.rows_full() + at.stage, shape.x_bytes);
  arrive_expecting(barrier, Ring::kInTurns ? bytes : shape.x_bytes + bytes);
  copy_box_once(ring.at(at.stage) + shape.x_bytes, &w, barrier, at.part * row / kMapUnit,
                packed_unit<kUnits>(shape, at.item), 0, 0);
}

template <class Ring>
__device__ void copy_packed_rows(const CUtensorMap& x, const PackedShape& shape, const Ring& ring,
                                 const PackedCursor& at) {
  copy_box(ring.at(at.stage), &x, ring.rows_full() + at.stage, 0, packed_first_row(shape, at.item),
           0, at.part * shape.depth * kPackedSlices);
}

/// A thread's part, one of up to kPackedCopiers: the copies of each so-manieth stage, as produce()
/// makes them. One thread for all would need 450 ns a stage.
template <int kUnits, class Ring>
__device__ void produce_packed(const CUtensorMap& w, const CUtensorMap& x, const PackedShape& shape,
                               const Ring& ring, int thread) {
  const int threads = min(kPackedCopiers, shape.stages);  // each a round behind the others at most
  if (thread >= threads) return;
  const auto advance = [&](PackedCursor& at, int stages) {
    for (int i = 0; i < stages; ++i) at.next(shape);
  };
  PackedCursor at(shape);
  advance(at, thread);
  // Rows of x come behind all that was asked for before them: so a stage each of the weight.
  if (!at.done(shape)) copy_packed<kUnits>(w, shape, ring, at);
  let_next_start();
  wait_for_previous();
  if (!at.done(shape)) copy_packed_rows(x, shape, ring, at);
  for (advance(at, threads); !at.done(shape); advance(at, threads)) {
    wait_barrier(ring.empty + at.stage, at.parity ^ 1);
    copy_packed<kUnits>(w, shape, ring, at);
    copy_packed_rows(x, shape, ring, at);
  }
}

// -- Products --

__device__ __forceinline__ void pin_registers(uint32_t (&a)[2][4]) {
#pragma unroll
  for (auto& r : a) asm volatile("" : "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), "+r"(r[3])::"memory");
}

template <int kRows, int kUnits>
__device__ void store_packed(__nv_bfloat16* y, const PackedShape& shape,
                             const float (&sum)[kRows / 2], int item, int warp) {
  const int t = threadIdx.x % 4, first_row = packed_first_row(shape, item),
            rows = min(first_row + shape.block_rows, shape.rows);
#pragma unroll
  for (int u = 0; u < (kUnits == 2 ? 2 : 1); ++u) {
    if (u == 1 && shape.up > 0) return;
    const int unit = packed_unit<kUnits>(shape, item) + (shape.up > 0 ? warp : warp * kUnits + u);
    const bool inside = warp < shape.warps && unit < shape.units;
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      float first = sum[4 * j + 2 * u], second = sum[4 * j + 2 * u + 1];
      if constexpr (kUnits == 2) {
        if (shape.up > 0) {
          const uint32_t gate = pack_bf16(first, second),
                         up = pack_bf16(sum[4 * j + 2], sum[4 * j + 3]);
          first = silu_times_straight(low_of(gate), low_of(up));
          second = silu_times_straight(high_of(gate), high_of(up));
        }
      }
      store_two(y + int64_t{unit} * kPackedRows, shape.stride, first, second,
                first_row + 8 * j + 2 * t, rows, inside);
    }
  }
}

/// A tile's end: the first half's sums go to the block that has the second, which stores both's.
template <int kRows, int kUnits>
__device__ __forceinline__ void end_packed(__nv_bfloat16* y, const PackedShape& shape,
                                           float (&sum)[kRows / 2], HalfSums<kRows, kUnits>& half,
                                           int item, int warp) {
  if (shape.cluster > 1) {
    if (cluster_rank() == 0) return half.send(sum);
    half.add_to(sum, item + packed_items_at_once(shape) < shape.items);
  }
  store_packed<kRows, kUnits>(y, shape, sum, item, warp);
}

/// Four warps' part. Two steps are under way, two wait in registers, and two are being unpacked.
template <class Kind, int kRows, int kUnits, int kDepth>
__device__ void consume_packed(__nv_bfloat16* y, const uint32_t* row_scales,
                               const PackedShape& shape, const StageRing& ring,
                               HalfSums<kRows, kUnits>& half, int warp) {
  const bool leader = threadIdx.x % kWarp == 0;
  const int groups = Kind::groups(shape),
            slot = min(warp, shape.warps - 1),  // a warp without rows does another's work again
      row = kDepth * shape.record_bytes, unit_bytes = (shape.up > 0 ? shape.warps : 1) * row,
            first_record = shape.x_bytes + packed_slot<kUnits>(shape, slot, 0) * row;
  const uint32_t x_slice = static_cast<uint32_t>(shape.block_rows * kSliceRowBytes >> 4);
  float sum[kRows / 2];
  uint32_t a[4][2][4];
#pragma unroll
  for (int i = 0; i < 32; ++i)  // 0, where no row of w is: in a register each, not made anew
    if (kUnits == 1) a[i / 8][i / 4 % 2][i % 4] = static_cast<uint32_t>((shape.rows + i) >> 31);
  PackedNumbers<Kind::kNumbers, kUnits> numbers;
  typename Kind::Unpacker unpack[kUnits];
  const auto unpack_next = [&]<int quarter>() {
    unpack_quarter<quarter>(a[quarter], numbers, unpack, unit_bytes, groups);
  };
  RingCursor at;
  const auto load = [&](int chunk) {
    numbers.load(ring.at(at.stage) + first_record + chunk * shape.record_bytes, unit_bytes,
                 groups > 0);
  };
  for (int item = first_packed_item(shape); item < shape.items;
       item += packed_items_at_once(shape)) {
    if (groups == 0)
#pragma unroll
      for (int u = 0; u < kUnits; ++u)
        numbers.scales[u] = row_scales[packed_row<kUnits>(shape, item, slot, u)];
#pragma unroll
    for (float& s : sum) s = 0.0f;
    wait_barrier(ring.full + at.stage, at.parity);
    load(0);
    unpack_next.template operator()<0>();
    unpack_next.template operator()<1>();
    int last = -1;  // the stage before this one
    for (int step = 0; step < shape.steps; ++step) {
      uint32_t x = describe_rows(ring.at(at.stage));
      const int stage = at.stage;
#pragma unroll
      for (int chunk = 0; chunk < kDepth; ++chunk) {
        const auto multiply = [&]<int quarter>() {
          wgmma_fence();
          packed_product<kRows>(sum, a[quarter][0], x + quarter % 2 * 4);
          packed_product<kRows>(sum, a[quarter][1], x + quarter % 2 * 4 + 2);
          wgmma_commit();
          if (quarter % 2 == 1) x += x_slice;
          wgmma_wait<2>();  // those that read the registers that are filled next
          pin_registers(a[(quarter + 2) % 4]);
        };
        multiply.template operator()<0>();
        unpack_next.template operator()<2>();
        multiply.template operator()<1>();
        if (chunk == 0 && leader && last >= 0) arrive(ring.empty + last);
        unpack_next.template operator()<3>();
        if (chunk + 1 < kDepth) {
          load(chunk + 1);
        } else if (step + 1 < shape.steps) {
          at.next(shape.stages);
          wait_barrier(ring.full + at.stage, at.parity);
          load(0);
        }
        multiply.template operator()<2>();
        unpack_next.template operator()<0>();
        multiply.template operator()<3>();
        unpack_next.template operator()<1>();
      }
      last = stage;
    }
    wgmma_wait<0>();
#pragma unroll
    for (float& s : sum) asm volatile("" : "+f"(s)::"memory");
    if (leader) arrive(ring.empty + last);
    at.next(shape.stages);
    end_packed<kRows, kUnits>(y, shape, sum, half, item, warp);
  }
}

}  // namespace nanovllm
