// The products of a mixture of experts whose weights are packed (packed.h) where an expert has many
// tokens, on sm_90: the weight is wgmma's first operand, which becomes bf16 in registers, the
// tokens are the second, which both warpgroups read in shared memory.
//
// Floor: the tensor cores. A unit of work is 128 places of an expert by 256 rows of its weight
// (where gated 128 of each half). Two warpgroups have two operands of 64 rows each, which meet all
// places, so that the places are read once for four times 64 rows; one chain of k16 steps per
// output from zero: the bits of expert_packed_kernel(). A third warpgroup brings what they need
// through a ring of stages, as many columns as a record has: the weight by the copy engine, as it
// is stored, the tokens, which lie anywhere, by ordinary asynchronous copies. Blocks stay and take
// unit after unit; the ring runs on.
#pragma once

#include "ops/cuda/moe/moe_gemm.cuh"
#include "ops/cuda/quantised/gemm_packed.cuh"

namespace nanovllm {

struct PackedManyCut {
  static constexpr int kTokens = 128, kEights = 32;  // of a unit: places, eights of rows
  static constexpr int kConsumers = 2 * kGroupThreads, kThreads = kConsumers + kGroupThreads;
  static constexpr int kSliceBytes = kTokens * kSliceRowBytes;  // of the tokens, in a stage
  static constexpr int kTokenBytes = kPackedSlices * kSliceBytes;
  static constexpr int kStages(WeightFormat::Numbers numbers) {
    return numbers == WeightFormat::int4 ? 4 : 3;
  }
  static constexpr int stage_bytes(int record_bytes) {
    return kTokenBytes + (kEights * record_bytes + 1023) / 1024 * 1024;
  }
  static constexpr int columns(bool gated) { return kEights * kPackedRows / (gated ? 2 : 1); }
};

/// A stack of packed weights, whose records a tensor map has.
struct PackedRecords {
  const unsigned char* row_scales;  // the first expert's, of whole rows
  int64_t expert_bytes;
  int record_bytes, groups;
};

/// The warpgroup that copies. A thread has one 16-byte chunk of every 16th row of each slice.
template <int kStages>
__device__ void bring_packed_units(const ExpertProduct<__nv_bfloat16>& product,
                                   const ExpertPlan& plan, const CUtensorMap* map,
                                   const StageRing& ring, int record_bytes, int eights, int units,
                                   int row_blocks) {
  using Cut = PackedManyCut;
  constexpr int kRowsAtOnce = 16, kCopies = Cut::kTokens / kRowsAtOnce;
  const int thread = threadIdx.x - Cut::kConsumers, row0 = thread / 8, chunk = thread % 8;
  RingCursor at, landed;
  bool is_behind = false;  // the copies of the stage before may be under way
  const auto land = [&] {
    fence_shared_for_async();
    arrive(ring.full + landed.stage);
    landed.next(kStages);
  };
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const ExpertTile tile = tile_at(plan, unit / row_blocks);
    uint32_t from[kCopies];  // of x, in pieces of eight columns
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int place = tile.first + min(i * kRowsAtOnce + row0, tile.rows - 1);
      from[i] = static_cast<uint32_t>((product.by_token ? plan.token_of[place] : place) *
                                      product.x_stride / 8) +
                chunk;
    }
    for (int k = 0; k < product.k; k += kPackedColumns, at.next(kStages)) {
      wait_barrier(ring.empty + at.stage, at.parity ^ 1);
      unsigned char* const to = ring.at(at.stage);
      if (thread == 0) {
        arrive_expecting(ring.full + at.stage, Cut::kEights * record_bytes);
        copy_box(to + Cut::kTokenBytes, map, ring.full + at.stage,
                 k / kPackedColumns * (record_bytes / kMapUnit), unit % row_blocks * eights, 0,
                 tile.expert);
      }
      // Where a tile has fewer rows, what lies there is multiplied: nobody reads those sums.
#pragma unroll
      for (int i = 0; i < kCopies; ++i)
        if (const int row = i * kRowsAtOnce + row0; row < tile.rows)
#pragma unroll
          for (int slice = 0; slice < kPackedSlices; ++slice)
            copy_async(to + slice * Cut::kSliceBytes + swizzled(row, chunk),
                       reinterpret_cast<const uint4*>(product.x) +
                           (from[i] + static_cast<uint32_t>(k + slice * kSliceWidth) / 8),
                       true);
      commit_copies();
      if (is_behind) {
        wait_copies<1>();
        land();
      }
      is_behind = true;
    }
  }
  wait_copies<0>();
  if (is_behind) land();
}

/// A warp's two operands, each two eights of the weight's rows: neighbouring columns of y, or those
/// of gates and of their ups. kGrouped: several groups of a record have scales.
template <WeightFormat::Numbers packing, bool kGated, bool kGrouped>
class PackedOperands {
  static constexpr int kWords = WeightFormat(packing).bits() / 4;  // of a lane, for two steps
  /// Among the warp's eights of y's columns.
  static constexpr int place_of(int operand, int u) { return kGated ? u : 2 * operand + u; }

 public:
  static constexpr int kOwn = kGated ? 2 : 4;  // eights of y's columns
  __device__ PackedOperands(int record_bytes, int groups)
      : record_bytes_(record_bytes), groups_(groups) {}

  /// Bytes before the warp's records in a stage.
  __device__ int first_record() const {
    return PackedManyCut::kTokenBytes +
           static_cast<int>(threadIdx.x) / kWarp * kOwn * record_bytes_;
  }
  /// Scales of whole rows, if that is what they are for, from the unit's first one on; `columns`:
  /// of y, `left` of them from there on.
  __device__ void take_scales(const uint32_t* scales, int columns, int left) {
    if (groups_ != 0) return;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const int column = (warp * kOwn + place_of(i, u)) * kPackedRows + lane / 4;
        unpack_[i][u] = Unpack<packing>(scales[min(column, left - 1) + (kGated ? i * columns : 0)]);
      }
  }
  /// Operand i of a step of 16 columns, of a record's eight.
  template <int step, int i>
  __device__ __forceinline__ void unpack(uint32_t (&a)[4], const unsigned char* records) {
    constexpr int kQuarter = step / 2, kHalf = kGated ? i * PackedManyCut::kEights / 2 : 0;
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const unsigned char* const record = records + (kHalf + place_of(i, u)) * record_bytes_;
      if constexpr (step % 2 == 0) {
        if constexpr (kQuarter * kWords % 4 == 0)
          part_[i][u] =
              reinterpret_cast<const uint4*>(record)[kQuarter * kWords / 4 * kWarp + lane];
        if (kGrouped ? groups_ * kQuarter % 4 == 0 : kQuarter == 0 && groups_ > 0)
          unpack_[i][u] = Unpack<packing>(*reinterpret_cast<const uint32_t*>(
              record + packed_number_bytes(packing) +
              (groups_ * kQuarter / 4 * kPackedRows + lane / 4) * 4));
      }
      uint32_t pairs[4];  // of two steps: what is not used is not computed
      unpack_[i][u](pairs, word_of(part_[i][u], kQuarter * kWords % 4),
                    word_of(part_[i][u], (kQuarter * kWords + kWords - 1) % 4));
      a[u] = pairs[step % 2 * 2], a[u + 2] = pairs[step % 2 * 2 + 1];
    }
  }

 private:
  int record_bytes_, groups_;
  uint4 part_[2][2];
  Unpack<packing> unpack_[2][2];
};

/// A warpgroup's sums of a unit, [operand], for kTokens places. Four products are under way while
/// the next operand is unpacked. Each is a group of its own: of two in a group, the second would
/// wait for what is unpacked between them. `turn`: the column at which the other warpgroup may
/// begin.
template <int kTokens, class Operands>
__device__ __forceinline__ void multiply_packed_unit(float (&sum)[2][64], Operands& operands,
                                                     const StageRing& ring, RingCursor& at,
                                                     int stages, int k_end, int turn) {
  using Cut = PackedManyCut;
  constexpr int kProducts = 2 * kPackedColumns / 16, kUnderway = 4, kHeld = 2 * kUnderway;
  const bool leader = threadIdx.x % kWarp == 0;
#pragma unroll
  for (auto& of_operand : sum)
#pragma unroll
    for (float& s : of_operand) s = 0.0f;
  uint32_t a[kHeld][1][4];
  const unsigned char* records;
  const auto await_stage = [&] {
    wait_barrier(ring.full + at.stage, at.parity);
    records = ring.at(at.stage) + operands.first_record();
  };
  const auto unpack_next = [&]<int i>() {
    operands.template unpack<i % kProducts / 2, i % 2>(a[i % kHeld][0], records);
  };
  const auto for_each = []<int... i>(std::integer_sequence<int, i...>, const auto& f) {
    (f.template operator()<i>(), ...);
  };
  await_stage();
  for_each(std::make_integer_sequence<int, kUnderway>(), unpack_next);
  int last = -1;  // the stage before this one
  for (int k = 0; k < k_end; k += kPackedColumns) {
    const int stage = at.stage;
    const uint32_t x = describe_rows(ring.at(stage));
    const auto multiply = [&]<int i>() {
      constexpr int kStep = i / 2;
      wgmma_fence();
      packed_product<kTokens>(sum[i % 2], a[i % kHeld][0],
                              x + kStep / 4 * (Cut::kSliceBytes >> 4) + kStep % 4 * 2);
      wgmma_commit();
      wgmma_wait<kUnderway>();  // the one that reads the registers that are filled next
      pin(a[(i + kUnderway) % kHeld]);
      if constexpr (i == kUnderway - 1) {  // those of the stage before have ended
        if (leader && last >= 0) arrive(ring.empty + last);
        if (k == turn) arrive_at<1, Cut::kConsumers>();
      }
      if constexpr (i == kProducts - kUnderway)
        if (k + kPackedColumns < k_end) {
          at.next(stages);
          await_stage();
        }
      unpack_next.template operator()<i + kUnderway>();
    };
    for_each(std::make_integer_sequence<int, kProducts>(), multiply);
    last = stage;
  }
  wgmma_wait<0>();
  pin(sum[0]);
  pin(sum[1]);
  if (leader) arrive(ring.empty + last);
  at.next(stages);
}

/// A warp's outputs of a unit, from y's column `column0` on, 16 bytes at a time.
template <bool kGated>
__device__ void store_packed_unit(const ExpertProduct<__nv_bfloat16>& product,
                                  const ExpertTile& tile, int column0, const float (&sum)[2][64]) {
  constexpr int kOwn = kGated ? 2 : 4, kTogether = 4 / kOwn;  // eights of columns, of places
  const int lane = threadIdx.x % kWarp, block = lane % 4;
#pragma unroll
  for (int j = 0; j < PackedManyCut::kTokens / 8; j += kTogether) {
    if (8 * j >= tile.rows) break;
    const auto pair = [&](int operand, int place, int u) {
      const int at = 4 * place + 2 * u;
      return pack_bf16(sum[operand][at], sum[operand][at + 1]);
    };
    uint32_t words[4];
    if constexpr (kGated) {
      const auto four = [&](int operand) {
        return uint4{pair(operand, j, 0), pair(operand, j, 1), pair(operand, j + 1, 0),
                     pair(operand, j + 1, 1)};
      };
      const uint4 outputs = silu_times_vector(four(0), four(1), true);
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = word_of(outputs, i);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = pair(i / 2, j, i % 2);
    }
#pragma unroll
    for (uint32_t& word : words) word = transposed(word);
    transpose_quad(words);
    const int row = 8 * (j + block / kOwn) + lane / 4, column = column0 + block % kOwn * 8;
    if (row < tile.rows && column < product.columns)
      *reinterpret_cast<uint4*>(product.y + (tile.first + row) * product.y_stride + column) = {
          words[0], words[1], words[2], words[3]};
  }
}

/// A multiplying warpgroup's part. The second one begins a stage behind the first, so that one
/// multiplies while the other stores.
template <WeightFormat::Numbers packing, bool kGated, bool kGrouped>
__device__ void multiply_packed_units(const ExpertProduct<__nv_bfloat16>& product,
                                      const ExpertPlan& plan, const PackedRecords& weight,
                                      const StageRing& ring, int units, int row_blocks) {
  using Cut = PackedManyCut;
  constexpr int kStages = Cut::kStages(packing);
  PackedOperands<packing, kGated, kGrouped> operands(weight.record_bytes, weight.groups);
  RingCursor at;
  const int group = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
  int turn = group == 0 ? min(kPackedColumns, product.k - kPackedColumns) : -1;
  if (group > 0 && static_cast<int>(blockIdx.x) < units) sync_threads<1, Cut::kConsumers>();
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x, turn = -1) {
    const ExpertTile tile = tile_at(plan, unit / row_blocks);
    const int column = unit % row_blocks * Cut::columns(kGated);
    operands.take_scales(
        reinterpret_cast<const uint32_t*>(weight.row_scales + tile.expert * weight.expert_bytes) +
            column,
        product.columns, product.columns - column);
    float sum[2][64];
    if (tile.rows > Cut::kTokens / 2)
      multiply_packed_unit<Cut::kTokens>(sum, operands, ring, at, kStages, product.k, turn);
    else
      multiply_packed_unit<Cut::kTokens / 2>(sum, operands, ring, at, kStages, product.k, turn);
    store_packed_unit<kGated>(
        product, tile, column + static_cast<int>(threadIdx.x) / kWarp * operands.kOwn * kPackedRows,
        sum);
  }
}

/// `map`: map_records() in boxes of kEights by one record.
template <WeightFormat::Numbers packing, bool kGated, bool kGrouped>
__global__ void __launch_bounds__(PackedManyCut::kThreads, 1)
    expert_packed_many_kernel(const __grid_constant__ ExpertProduct<__nv_bfloat16> product,
                              const __grid_constant__ ExpertPlan plan,
                              const __grid_constant__ PackedRecords weight,
                              const __grid_constant__ CUtensorMap map, int row_blocks) {
  using Cut = PackedManyCut;
  constexpr int kStages = Cut::kStages(packing);
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ uint64_t full[kStages], empty[kStages];
  const StageRing ring{shared + (1024 - shared_address(shared) % 1024) % 1024,
                       Cut::stage_bytes(weight.record_bytes), full, empty};
  if (threadIdx.x == Cut::kConsumers) {
    prefetch_map(&map);
    for (int i = 0; i < kStages; ++i) {
      init_barrier(&full[i], kGroupThreads + 1);  // the copying threads, and the weight
      init_barrier(&empty[i], Cut::kConsumers / kWarp);
    }
    fence_new_barriers();
  }
  __syncthreads();
  wait_for_previous();
  let_next_start();
  const int units = num_tiles(plan) * row_blocks;
  const int warp = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarp, 0);
  if (warp >= Cut::kConsumers / kWarp) {
    leave_registers<40>();
    bring_packed_units<kStages>(product, plan, &map, ring, weight.record_bytes,
                                Cut::columns(kGated) / kPackedRows, units, row_blocks);
  } else {
    take_registers<232>();
    multiply_packed_units<packing, kGated, kGrouped>(product, plan, weight, ring, units,
                                                     row_blocks);
  }
}

}  // namespace nanovllm
