// Tensor maps: how the copy engine (TMA) of sm_90 sees a matrix in global memory.
#pragma once

#include <array>

#include <cuda.h>

#include "core/check.h"
#include "core/tensor.h"

namespace nanovllm {

/// cuTensorMapEncodeTiled, as found in the driver.
using EncodeMap = decltype(&cuTensorMapEncodeTiled);

/// Elements at `data`, bf16 unless `type` says otherwise, copied in boxes that are swizzled by 128
/// bytes, as wgmma reads them (64 bf16 wide at most), unless `swizzle` says otherwise. The
/// innermost axis comes first; strides in bytes, of the axes after it.
template <size_t kAxes>
CUresult encode_map(EncodeMap encode, CUtensorMap& map, void* data,
                    const std::array<int64_t, kAxes>& shape,
                    const std::array<int64_t, kAxes - 1>& strides,
                    const std::array<int64_t, kAxes>& box,
                    CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                    CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                    CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  std::array<cuuint64_t, kAxes> sizes{};
  std::array<cuuint64_t, kAxes - 1> bytes{};
  std::array<cuuint32_t, kAxes> boxes{}, every{};
  for (size_t i = 0; i < kAxes; ++i) {
    sizes[i] = static_cast<cuuint64_t>(shape[i]);
    boxes[i] = static_cast<cuuint32_t>(box[i]);
    every[i] = 1;
    if (i + 1 < kAxes) bytes[i] = static_cast<cuuint64_t>(strides[i]);
  }
  return encode(&map, type, kAxes, data, sizes.data(), bytes.data(), boxes.data(), every.data(),
                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

/// The same of `t`, whose elements these are. Throws Error(engine) where the driver refuses.
template <size_t kAxes>
CUtensorMap tensor_map(EncodeMap encode, const Tensor& t, const std::array<int64_t, kAxes>& shape,
                       const std::array<int64_t, kAxes - 1>& strides,
                       const std::array<int64_t, kAxes>& box,
                       CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  CUtensorMap map{};
  const CUresult status = encode_map(
      encode, map, t.data, shape, strides, box, promotion,
      t.dtype == DType::e4m3 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16);
  check(status == CUDA_SUCCESS, ErrorKind::engine, "CUDA: no tensor map of {} (error {})",
        t.describe(), static_cast<int>(status));
  return map;
}

/// Half of a paged cache, [blocks, KV heads, block size, head_dim] in bf16 or E4M3, in boxes of
/// `keys` rows of 128 bytes out of one block.
inline CUtensorMap cache_map(EncodeMap encode, const Tensor& cache, int64_t keys,
                             CUtensorMapL2promotion promotion) {
  const auto& size = cache.shape;
  const auto bytes = static_cast<int64_t>(size_of(cache.dtype));
  return tensor_map<4>(encode, cache, {size[3], size[2], size[1], size[0]},
                       {size[3] * bytes, cache.stride[1] * bytes, cache.stride[0] * bytes},
                       {128 / bytes, keys, 1, 1}, promotion);
}

}  // namespace nanovllm
