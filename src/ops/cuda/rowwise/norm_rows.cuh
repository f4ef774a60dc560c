// RMSNorm's kernels of rows that are whole vectors of bf16: a row belongs to a block, or, where
// there are many rows and in micro-batches, to a warp: no barrier then, and more bytes under way.
// Rows for a product that quantises them are quantised, by a block each however many there are: a
// lane with a sixteenth of a row takes too long over its quotients.
#pragma once

#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/quantised/quantised_rows.cuh"
#include "ops/cuda/rowwise/row_math.cuh"

namespace nanovllm {

/// Rows of a [t, n] or [t, heads, n] tensor.
template <class T>
struct RowsOf {
  T* data;
  int64_t outer_stride, inner_stride;
  __device__ T* row(int64_t outer, int64_t inner) const {
    return data + outer * outer_stride + inner * inner_stride;
  }
};

template <class T>
RowsOf<DeviceType<T>> rows_of(const Tensor& t) {
  return {device_ptr<T>(t), t.stride[0], t.rank == 3 ? t.stride[1] : 0};
}

template <class T>
__device__ void store_normalised(T* target, Vec<T> values, const Vec<T>& weights, float reciprocal,
                                 int64_t count, bool wide) {
  normalise(values, reciprocal, weights);
  store_vec(target, values, count, wide);
}

constexpr int kMostWarps = 16;  // that share a row, as in the general kernels

/// The largest magnitude of a row, of which a thread has the vectors v.
template <int kHeld>
__device__ float most_of_row(const Vec<__nv_bfloat16> (&v)[kHeld]) {
  __shared__ float warps[kMostWarps];
  const unsigned own = threadIdx.x / kWarp, count = blockDim.x / kWarp;
  float most = most_of(v[0]);
#pragma unroll
  for (int i = 1; i < kHeld; ++i) most = most_of(most, most_of(v[i]));
  most = most_of_lanes<kWarp>(most);
  if (threadIdx.x % kWarp == 0) warps[own] = most;
  __syncthreads();
  for (unsigned i = 0; i < count; ++i) most = most_of(most, warps[i]);
  return most;
}

/// Ends of a row: it is stored, where it was or elsewhere, or quantised with scales of groups, or
/// with its own.
template <class T>
struct RowsInPlace {
  static constexpr bool kNeedsMost = false;
  T* x;
  int64_t n;
  __device__ void put(int64_t row, int column, const Vec<T>& v, float) const {
    *reinterpret_cast<Vec<T>*>(x + row * n + column) = v;
  }
};
struct StoredRows {
  static constexpr bool kNeedsMost = false;
  RowsOf<__nv_bfloat16> y;
  __device__ void put(unsigned row, int column, const Vec<__nv_bfloat16>& v, float) const {
    store_whole(y.row(row, 0) + column, v);
  }
};
struct RowsOfGroups {
  static constexpr bool kNeedsMost = false;
  QuantisedRows<WeightFormat::e4m3> to;
  __device__ void put(unsigned row, int column, const Vec<__nv_bfloat16>& v, float) const {
    to.put_of_group(row, column, v);
  }
};
template <WeightFormat::Numbers kind>
struct RowsOfTokens {
  static constexpr bool kNeedsMost = true;
  QuantisedRows<kind> to;
  __device__ void put(unsigned row, int column, const Vec<__nv_bfloat16>& v, float most) const {
    const float scale = to.scale_of(most);
    if (column == 0) to.scales[row] = scale;
    to.put(row, column, v, scale);
  }
};

template <class Go>
bool CudaBackend::with_rows_for(const Weight& reader, Tensor y, Go&& go) {
  if (!reader.format.quantises_rows() || divides_sms() || y.numel() == 0) return false;
  QuantisedOperand operand = quantised_room(y.shape[0], reader);
  operand.x = y.data, operand.reader = reader.data.data;
  using enum WeightFormat::Numbers;
  const auto rows = [&]<WeightFormat::Numbers kind>() {
    return rows_in<kind>(operand.numbers, operand.scales, y.shape[0], y.shape[1]);
  };
  const auto kind = reader.format.rows;
  bool done = false;
  if (kind == WeightFormat::Rows::group)
    done = go(RowsOfGroups{rows.template operator()<e4m3>()});
  else if (kind == WeightFormat::Rows::token && reader.format.numbers == int8)
    done = go(RowsOfTokens<int8>{rows.template operator()<int8>()});
  else if (kind == WeightFormat::Rows::token)
    done = go(RowsOfTokens<e4m3>{rows.template operator()<e4m3>()});
  if (done) micro_batch_->operand = operand;
  return done;
}

/// Rows that are added or normalised: those of a tensor, or the rounded sums of two.
struct PlainRows {
  RowsOf<__nv_bfloat16> x;
  __device__ Vec<__nv_bfloat16> load(unsigned row, int column) const {
    return load_vec(x.row(row, 0) + column, Vec<__nv_bfloat16>::size, true);
  }
};
struct SummedRows {
  PlainRows first, second;
  __device__ Vec<__nv_bfloat16> load(unsigned row, int column) const {
    Vec<__nv_bfloat16> sum = second.load(row, column);
    add_stream(sum, first.load(row, column));
    return sum;
  }
};

constexpr int kRowsPerBlock = 4;

/// y = rms_norm(x), or with kAdd stream += x; y = rms_norm(stream): a warp has row `blockIdx.x *
/// kRowsPerBlock + its number` from the end, of kVectors vectors for each lane. Vector j is the one
/// that the lane of warp j % kWarps has in the general kernels. kEarly: what other kernels have
/// left for long is asked for before the one before this is done.
template <bool kAdd, int kVectors, bool kEarly, class Rows>
__global__ void __launch_bounds__(kRowsPerBlock* kWarp)
    many_rows_kernel(RowsOf<__nv_bfloat16> y, RowsOf<__nv_bfloat16> stream, const Rows x,
                     const __nv_bfloat16* w, unsigned rows, float eps) {
  using V = Vec<__nv_bfloat16>;
  constexpr int kStep = kWarp * V::size, kWarps = kVectors < 16 ? kVectors : 16, kAtOnce = 8;
  static_assert(kVectors > 2);
  let_next_start();
  const unsigned index = blockIdx.x * kRowsPerBlock + threadIdx.x / kWarp;
  const int first = static_cast<int>(threadIdx.x % kWarp) * V::size;
  // The last rows first: they are what the kernel before left in the L2 cache, and what this one
  // writes last is what the next, which begins with the first rows, finds there.
  const unsigned row = rows - 1 - min(index, rows - 1);
  __nv_bfloat16* target = kAdd ? stream.row(row, 0) + first : nullptr;
  V weights[kEarly ? kVectors : 1];
  if constexpr (kEarly) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      weights[j] = load_vec(w + first + j * kStep, V::size, true);
      if (kAdd) asm volatile("prefetch.global.L2 [%0];" ::"l"(target + j * kStep));
    }
  }
  wait_for_previous();
  if (index >= rows) return;
  V held[kVectors];
  float sum[kWarps];
#pragma unroll
  for (int begin = 0; begin < kVectors; begin += kAtOnce) {
    V old[kAtOnce];
#pragma unroll
    for (int j = begin; j < begin + kAtOnce && j < kVectors; ++j) {
      held[j] = x.load(row, first + j * kStep);
      if (kAdd) old[j - begin] = load_vec(target + j * kStep, V::size, true);
    }
#pragma unroll
    for (int j = begin; j < begin + kAtOnce && j < kVectors; ++j) {
      if (kAdd) {
        add_stream(held[j], old[j - begin]);
        store_whole(target + j * kStep, held[j]);
      }
      sum[j % kWarps] = add_squares(j < kWarps ? 0.0f : sum[j % kWarps], held[j]);
    }
  }
  float total = warp_sum(sum[0]);
#pragma unroll
  for (int i = 1; i < kWarps; ++i) total += warp_sum(sum[i]);
  const float reciprocal = reciprocal_rms(total, kVectors * kStep, eps);
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if constexpr (!kEarly) weights[0] = load_vec(w + first + j * kStep, V::size, true);
    store_normalised(y.row(row, 0) + first + j * kStep, held[j], weights[kEarly ? j : 0],
                     reciprocal, V::size, true);
  }
}

constexpr int warps_of_row(int vectors) { return vectors < kMostWarps ? vectors : kMostWarps; }
/// Rows that an SM may have at once, for which threads keep to few registers.
constexpr int rows_together(int vectors) {
  return vectors > 20 ? 2 : 3 * kMostWarps / warps_of_row(vectors);
}

/// The same, in order and with a block to a row: warp j has vectors j, j + kWarps, ... of each
/// lane's. That is what the general kernels do, but in half of their registers: blocks find room
/// beside each other, and beside those of the products around them.
template <bool kAdd, int kVectors, class End, class Rows>
__global__ void __launch_bounds__(warps_of_row(kVectors) * kWarp, rows_together(kVectors))
    one_row_kernel(const End end, RowsOf<__nv_bfloat16> stream, const Rows x,
                   const __nv_bfloat16* w, float eps) {
  using V = Vec<__nv_bfloat16>;
  constexpr int kWarps = warps_of_row(kVectors), kHeld = (kVectors + kWarps - 1) / kWarps,
                kStep = kWarps * kWarp * V::size;
  __shared__ float sums[kWarps];
  let_next_start();
  const unsigned first = threadIdx.x * V::size, warp = threadIdx.x / kWarp;
  const auto for_own = [&](const auto& f) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if ((i + 1) * kWarps <= kVectors || warp < kVectors - i * kWarps) f(i, first + i * kStep);
  };
  V weights[kHeld], held[kHeld] = {}, old[kHeld];
  for_own([&](int i, unsigned c) { weights[i] = load_vec(w + c, V::size, true); });
  wait_for_previous();
  for_own([&](int i, unsigned c) {
    held[i] = x.load(blockIdx.x, static_cast<int>(c));
    if (kAdd) old[i] = load_vec(stream.row(blockIdx.x, 0) + c, V::size, true);
  });
  float sum = 0.0f;
  for_own([&](int i, unsigned c) {
    if (kAdd) {
      add_stream(held[i], old[i]);
      store_whole(stream.row(blockIdx.x, 0) + c, held[i]);
    }
    sum = add_squares(sum, held[i]);
  });
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) sums[warp] = sum;
  __syncthreads();
  float total = sums[0];
#pragma unroll
  for (int j = 1; j < kWarps; ++j) total += sums[j];
  const float reciprocal = reciprocal_rms(total, kVectors * kWarp * V::size, eps);
  for_own([&](int i, unsigned) { normalise(held[i], reciprocal, weights[i]); });
  float most = 0.0f;
  if constexpr (End::kNeedsMost) most = most_of_row(held);
  for_own([&](int i, unsigned c) { end.put(blockIdx.x, static_cast<int>(c), held[i], most); });
}

}  // namespace nanovllm
