// Keys and values of E4M3 in the decoder layers' kernel, with the bits of
// attention_decode_compute.cuh: numbers become bf16 in their stage of the ring, most of them while
// the block waits for the query.
#pragma once

#include "ops/cuda/decoder/decoder_fp8.cuh"
#include "ops/cuda/decoder/decoder_heads.cuh"

namespace nanovllm::decoder {

/// Numbers arrive in the second half of their stage, 128 bytes a row, in the copy engine's pattern.
constexpr int kNumbersAt = kTileKeys * 128;

/// Eight rows of a tile, from `rows` on, become bf16: the first 64 elements in the first half of
/// the stage, the others where the numbers were. Sixteen elements are then in the order of
/// widen_e4m3(). Row `kept`, if any, is left alone. By a whole warp, of which eight neighbours have
/// rows and pieces that meet no bank twice.
template <int kHeadDim>
__device__ __forceinline__ void widen_rows(uint32_t rows, int kept, int lane) {
  const int row = lane / 8 ^ lane / 4 % 2 * 5, piece = lane % 4;
  uint32_t from = rows + kNumbersAt + row * 128 + (piece ^ row) * 16,
           to = rows + row * 128 + (2 * piece ^ row) * 16;
#pragma unroll 1  // both at once would take more registers than there are
  for (int half = 0; half < kHeadDim / 64; ++half, from ^= 64, to += kNumbersAt) {
    Packed numbers, even, odd;
    if (row != kept) numbers = load_shared(from);
    __syncwarp();
    if (row == kept) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j) widen_e4m3(numbers.pair[j], even.pair[j], odd.pair[j]);
    store_shared(to, even);
    store_shared(to ^ 16, odd);
  }
}

// A block of the cache has, of each head, its rows' numbers, and behind them their scales.

/// Of a head in a block, from the start of the layer's keys or values.
template <int kHeadDim>
__device__ int64_t page_offset(const Arguments& a, int64_t block, int kv_head) {
  return (block * a.kv_heads + kv_head << a.block_shift) * (kHeadDim + int64_t{sizeof(float)});
}
__device__ inline unsigned char* layer_of(void* cache, int layer, int64_t stride) {
  return static_cast<unsigned char*>(cache) + layer * stride;
}

/// The scales of a unit's keys, and of their values: four for each lane of some warps.
template <int kHeadDim>
class UnitScales {
 public:
  /// They come as near as the L2 cache; behind the row's position the cache may have no block.
  __device__ __forceinline__ UnitScales(const Worker<kHeadDim>& w, const Unit& unit, int first_key,
                                        int thread) {
    const Arguments& a = w.a;
    const int key = first_key + thread % kQuads * 4, size = 1 << a.block_shift;
    if (thread < 0 || thread >= 2 * kQuads || key > unit.position) return;
    const int block = a.block_tables[unit.row * a.table_stride + (key >> a.block_shift)];
    from_ = (thread < kQuads ? layer_of(a.k_cache, w.layer, a.k_layer_stride)
                             : layer_of(a.v_cache, w.layer, a.v_layer_stride)) +
            page_offset<kHeadDim>(a, block, unit.kv_head) + size * kHeadDim +
            (key & (size - 1)) * static_cast<int>(sizeof(float));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from_));
  }
  /// Begins to copy them to shared memory, where qkv's operand may have been.
  __device__ __forceinline__ void copy(const Worker<kHeadDim>& w, int thread) const {
    if (from_)
      copy_async(&w.shared.attention.scales[thread / kQuads][thread % kQuads * 4], from_, true);
    commit_copies();
  }

 private:
  static constexpr int kQuads = kChunk / 4;
  const unsigned char* from_ = nullptr;
};

/// A lane's part of a new row: its numbers and, in the place of its second pair, the row's scale.
template <int kLanes>
__device__ __forceinline__ HeadPart quantise_part(const HeadPart& x, float fixed) {
  const float most =
                  most_of_lanes<kLanes>(nanovllm::most_of(most_of(x.pair[0]), most_of(x.pair[1]))),
              scale = row_scale(most, fixed);
  return {{scale == scale ? quantise_four(x.pair[0], x.pair[1], Divisor(scale)) : 0,
           __float_as_uint(scale)}};
}

/// Stores it in row `offset` of a block.
template <int kHeadDim>
__device__ __forceinline__ void store_numbers(const Worker<kHeadDim>& w, const HeadPart& x,
                                              bool is_key, int64_t block, int kv_head, int offset,
                                              int lane) {
  const Arguments& a = w.a;
  unsigned char* const page = (is_key ? layer_of(a.k_cache, w.layer, a.k_layer_stride)
                                      : layer_of(a.v_cache, w.layer, a.v_layer_stride)) +
                              page_offset<kHeadDim>(a, block, kv_head);
  reinterpret_cast<uint32_t*>(page + offset * kHeadDim)[lane] = x.pair[0];
  if (lane == 0)
    reinterpret_cast<uint32_t*>(page + (kHeadDim << a.block_shift))[offset] = x.pair[1];
}

}  // namespace nanovllm::decoder
