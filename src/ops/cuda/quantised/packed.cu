// Packs quantised weights as packed.cuh has them, and unpacks whole ones for products of many rows.
#include <algorithm>
#include <bit>

#include "ops/cuda/core/handles.h"
#include "ops/cuda/core/layout.h"
#include "ops/cuda/quantised/packed.cuh"
#include "ops/cuda/quantised/packed.h"

namespace nanovllm {
namespace {

constexpr int kThreads = 128;

/// A block packs a record. `numbers` [n, k], `scales` and `zeros` [n, k / group].
template <WeightFormat::Numbers packing>
__global__ void __launch_bounds__(kThreads)
    pack_kernel(unsigned char* to, PackedLayout at, const int8_t* numbers, const float* scales,
                const int8_t* zeros, bool even) {
  const int64_t row0 = blockIdx.x / at.columns * int64_t{kPackedRows},
                column0 = blockIdx.x % at.columns * int64_t{kPackedColumns},
                groups = at.k / at.group;
  unsigned char* const record = to + int64_t{blockIdx.x} * at.record_bytes;
  for (int i = threadIdx.x; i < packed_number_bytes(packing) / 4; i += kThreads) {
    const int lane = i % (kWarp * 4) / 4, t = lane % 4,
              word = i % 4 + i / (kWarp * 4) * 4;  // of the lane's
    const int8_t* row = numbers + (row0 + lane / 4) * at.k + column0 + 2 * t;
    uint32_t v = 0;
    if constexpr (packing == WeightFormat::int4)
      for (int p = 0; p < 4; ++p)
        for (int e = 0; e < 2; ++e)
          v |= static_cast<uint32_t>(row[32 * word + 8 * p + e] + 8) << (16 * e + 4 * p);
    else
      for (int b = 0; b < 4; ++b) {
        const auto q = static_cast<uint8_t>(row[16 * word + b / 2 * 8 + b % 2]);
        v |= uint32_t{packing == WeightFormat::int8 ? uint8_t(q ^ 0x80) : q} << (8 * b);
      }
    reinterpret_cast<uint32_t*>(record)[i] = v;
  }
  const auto word_of = [&](int64_t row, int64_t group) {
    const uint32_t scale = __float_as_uint(scales[row * groups + group]);
    if (packing == WeightFormat::int4 && even)
      return scale | static_cast<uint32_t>(zeros[row * groups + group] + 8);
    return scale;
  };
  for (int i = threadIdx.x; i < at.groups * kPackedRows; i += kThreads)
    reinterpret_cast<uint32_t*>(record + packed_number_bytes(packing))[i] =
        word_of(row0 + i % kPackedRows,
                (column0 + i / kPackedRows * kPackedColumns / at.groups) / at.group);
  if (column0 == 0 && at.groups == 0 && threadIdx.x < kPackedRows)
    reinterpret_cast<uint32_t*>(to + at.row_scales())[row0 + threadIdx.x] =
        word_of(row0 + threadIdx.x, 0);
  if (column0 == 0 && zeros)
    for (int64_t i = threadIdx.x; i < kPackedRows * groups; i += kThreads)
      to[at.zeros() + row0 * groups + i] = static_cast<unsigned char>(
          zeros[row0 * groups + i] ^ (packing == WeightFormat::int4 && even ? kZeroInScale : 0));
}

/// A warp unpacks a record.
template <WeightFormat::Numbers packing, bool even>
__global__ void __launch_bounds__(kThreads)
    unpack_kernel(__nv_bfloat16* to, const unsigned char* from, PackedLayout at) {
  wait_for_previous();
  const int64_t record = int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (record >= at.records()) return;
  constexpr int kParts = WeightFormat(packing).bits() / 4;
  const int lane = threadIdx.x % kWarp;
  const int64_t row = record / at.columns * kPackedRows + lane / 4,
                column0 = record % at.columns * kPackedColumns;
  const unsigned char* const data = from + record * at.record_bytes;
  uint4 parts[kParts];
#pragma unroll
  for (int p = 0; p < kParts; ++p)
    parts[p] = reinterpret_cast<const uint4*>(data)[p * kWarp + lane];
  const auto word = [&](int i) { return word_of(parts[i / 4], i % 4); };
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // 32 columns
    const uint32_t scale =
        at.groups == 0
            ? reinterpret_cast<const uint32_t*>(from + at.row_scales())[row]
            : reinterpret_cast<const uint32_t*>(
                  data + packed_number_bytes(packing))[i * at.groups / 4 * kPackedRows + lane / 4];
    [[maybe_unused]] int zero = 0;
    if constexpr (!even)
      zero = static_cast<int8_t>(
          from[at.zeros() + row * (at.k / at.group) + (column0 + 32 * i) / at.group]);
    uint32_t v[4];
    const uint32_t first = word(i * kParts), second = word(i * kParts + kParts - 1);
    if constexpr (even)
      Unpack<packing>{scale}(v, first, second);
    else
      UnpackAny<packing>{scale, zero}(v, first, second);
    transpose_quad(v);
    *reinterpret_cast<uint4*>(to + row * at.k + column0 + 32 * i + lane % 4 * 8) =
        uint4{v[0], v[1], v[2], v[3]};
  }
}

}  // namespace

bool unpacks_evenly(WeightFormat format, const QuantizedRows& rows) {
  if (format.numbers == WeightFormat::int4)
    return std::all_of(rows.scales.begin(), rows.scales.end(),
                       [](float scale) { return (std::bit_cast<uint32_t>(scale) & 0xfff) == 0; });
  return std::all_of(rows.zeros.begin(), rows.zeros.end(), [](int8_t zero) { return zero == 0; });
}

void pack_weight(const Weight& to, const int8_t* numbers, const float* scales, const int8_t* zeros,
                 bool even, cudaStream_t stream) {
  const PackedLayout at(to.format, to.n(), to.k());
  with_numbers(to.format, [&]<WeightFormat::Numbers p>() {
    pack_kernel<p><<<grid_size(at.records()), kThreads, 0, stream>>>(
        reinterpret_cast<unsigned char*>(to.data.data), at, numbers, scales, zeros, even);
  });
  cuda_check(cudaGetLastError());
}

void unpack_weight(Tensor to, const Weight& from, bool even, cudaStream_t stream) {
  const PackedLayout at(from.format, from.n(), from.k());
  const unsigned grid = grid_size(ceil_div(at.records(), kThreads / kWarp));
  with_numbers(from.format, [&]<WeightFormat::Numbers p>() {
    const auto go = [&](auto kernel) {
      kernel<<<grid, kThreads, 0, stream>>>(
          device_ptr<bf16>(to), reinterpret_cast<const unsigned char*>(from.data.data), at);
    };
    if constexpr (p != WeightFormat::e4m3)
      if (!even) return go(unpack_kernel<p, false>);
    go(unpack_kernel<p, true>);
  });
  cuda_check(cudaGetLastError());
}

}  // namespace nanovllm
