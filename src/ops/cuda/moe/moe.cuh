// Shared by the kernels of a mixture of experts: how the pairs (token, one of its experts) are
// grouped, and the arguments of the grouped products.
//
// A place is a pair's row in the intermediate results. Places are sorted by expert and cut into
// tiles: a tile is some rows of one expert, and one tile by some rows of that expert's weight is a
// unit of work. All of it stays on the device: grids are bounds, blocks without work leave.
#pragma once

#include <algorithm>

#include "ops/backend.h"
#include "ops/cuda/ptx/device.cuh"

namespace nanovllm {

struct ExpertTile {
  int expert, first, rows;  // places first .. first + rows
  int unused;
};
static_assert(sizeof(ExpertTile) == 16);

/// MoeWorkspace::plan. Where pairs are few they are not sorted: every pair is a tile, its place its
/// own number (`tiles` is null then).
struct ExpertPlan {
  ExpertTile* tiles = nullptr;
  int *token_of = nullptr, *place_of = nullptr;  // by place; by pair
  int* num_tiles = nullptr;
  const int* ids = nullptr;  // the expert of a pair
  int pairs = 0, experts = 0, per_token = 0;
  int tile_rows = 0;  // at most, in a tile

  /// No plan has more tiles.
  int most_tiles() const { return tiles ? std::min(pairs, experts + pairs / tile_rows) : pairs; }
};

#ifdef __CUDACC__
__device__ inline int num_tiles(const ExpertPlan& plan) {
  return plan.tiles ? *plan.num_tiles : plan.pairs;
}
__device__ inline ExpertTile tile_at(const ExpertPlan& plan, int i) {
  return plan.tiles ? plan.tiles[i] : ExpertTile{plan.ids[i], i, 1, 0};
}
__device__ inline int token_of(const ExpertPlan& plan, int place) {
  return plan.tiles ? plan.token_of[place] : place / plan.per_token;
}
__device__ inline int place_of(const ExpertPlan& plan, int pair) {
  return plan.tiles ? plan.place_of[pair] : pair;
}

/// silu(gate) * up of two products in T, rounded to T: silu_and_mul() of a gemm().
template <class T>
__device__ T gated(float gate, float up) {
  const float g = to_float(round_to<T>(gate)), u = to_float(round_to<T>(up));
  return round_to<T>(g / (1.0f + expf(-g)) * u);
}
#endif

/// y[place, :] = x[row of the place, :] w[its expert]^T; `gated`: silu of the first half of w's
/// rows, times the second.
template <class T>
struct ExpertProduct {
  T* y;
  const T *x, *w;
  int64_t y_stride, x_stride, expert_stride;  // elements
  int columns, k;                             // of y; of x
  bool by_token;                              // x has a row per token, not per place
};

/// y [places, columns], x [rows, k], w [experts, rows of the weight, k].
template <class T>
ExpertProduct<DeviceType<T>> product_of(const Tensor& y, const Tensor& x, const Tensor& w,
                                        bool by_token) {
  return {device_ptr<T>(y),
          device_ptr<T>(x),
          device_ptr<T>(w),
          y.stride[0],
          x.stride[0],
          w.stride[0],
          static_cast<int>(y.shape[1]),
          static_cast<int>(x.shape[1]),
          by_token};
}

/// The same with a packed weight, which has a description of its own.
inline ExpertProduct<__nv_bfloat16> packed_product_of(const Tensor& y, const Tensor& x,
                                                      bool by_token) {
  return {device_ptr<bf16>(y),
          device_ptr<bf16>(x),
          nullptr,
          y.stride[0],
          x.stride[0],
          0,
          static_cast<int>(y.shape[1]),
          static_cast<int>(x.shape[1]),
          by_token};
}

}  // namespace nanovllm
