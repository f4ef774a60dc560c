// The kernels of communicator.cu. Each is one launch, for data of any size: blocks take one piece
// after another, at most kPlaceBytes at a time.
#pragma once

#include "ops/cuda/peer_exchange.cuh"
#include "ops/cuda/row_math.cuh"

namespace nanovllm {

template <class T>
__global__ void __launch_bounds__(kExchangeThreads)
    all_reduce_one_shot_kernel(Vec<T>* x, int64_t count, int64_t chunk,
                               const __grid_constant__ PeerTable table) {
  Exchange exchange(table);
  for (int64_t begin = blockIdx.x * chunk; begin < count; begin += gridDim.x * chunk) {
    const int64_t size = min(chunk, count - begin);
    exchange.begin_round();
    for (int64_t i = threadIdx.x; i < size; i += blockDim.x) {
      const uint4 bits = reinterpret_cast<const uint4&>(x[begin + i]);
      for (int r = 0; r < table.world; ++r)
        if (r != table.rank) exchange.place(r, table.rank)[i] = bits;
    }
    exchange.meet();
    for (int64_t i = threadIdx.x; i < size; i += blockDim.x)
      x[begin + i] = sum_of_ranks<T>(exchange, table, x[begin + i], i);
  }
  exchange.end();
}

template <class T>
__global__ void __launch_bounds__(kExchangeThreads)
    all_reduce_two_shot_kernel(Vec<T>* x, int64_t count, int64_t chunk,
                               const __grid_constant__ PeerTable table) {
  Exchange exchange(table);
  for (int64_t begin = blockIdx.x * chunk; begin < count; begin += gridDim.x * chunk) {
    const int64_t size = min(chunk, count - begin);
    const auto part = [&](int r) { return begin + size * r / table.world; };
    exchange.begin_round();
    for (int r = 0; r < table.world; ++r)
      for (int64_t i = part(r) + threadIdx.x; r != table.rank && i < part(r + 1); i += blockDim.x)
        exchange.place(r, table.rank)[i - part(r)] = reinterpret_cast<const uint4&>(x[i]);
    exchange.meet();
    const Exchange parts = exchange;
    exchange.begin_round();
    const int64_t own = part(table.rank), own_size = part(table.rank + 1) - own;
    for (int64_t i = threadIdx.x; i < own_size; i += blockDim.x) {
      const Vec<T> sum = sum_of_ranks<T>(parts, table, x[own + i], i);
      x[own + i] = sum;
      for (int r = 0; r < table.world; ++r)
        if (r != table.rank) exchange.place(r, table.rank)[i] = reinterpret_cast<const uint4&>(sum);
    }
    exchange.meet();
    for (int r = 0; r < table.world; ++r)
      for (int64_t i = part(r) + threadIdx.x; r != table.rank && i < part(r + 1); i += blockDim.x) {
        const uint4 bits = __ldcg(exchange.place(table.rank, r) + (i - part(r)));
        x[i] = reinterpret_cast<const Vec<T>&>(bits);
      }
  }
  exchange.end();
}

/// How a warp's vectors, one of 16 bytes in each lane, travel in words of 12: a lane's first 12
/// bytes are a word, and the last 4 of three lanes are one more, which a lane of the first sends.
/// All words of the first kind come first.
class WarpVectors {
 public:
  /// Words for so many vectors.
  static constexpr int64_t words(int64_t vectors) {
    return vectors + ceil_div(vectors, int64_t{kWarp}) * kShared;
  }
  /// The vectors from `first` on, a multiple of kWarp, of `count` in all; for all lanes.
  __device__ WarpVectors(int64_t first, int64_t count) : lane_(threadIdx.x % kWarp) {
    const int present = static_cast<int>(min(int64_t{kWarp}, count - first));
    has_own_ = lane_ < present;
    has_shared_ = lane_ < (present + 2) / 3;
    own_ = first + lane_;
    shared_ = count + first / kWarp * kShared + lane_;
  }
  __device__ void send(const Exchange& exchange, const PeerTable& table, uint4 bits) const {
    const auto last_of = [&](int i) { return __shfl_sync(kFullMask, bits.w, 3 * lane_ + i); };
    const uint3 shared{last_of(0), last_of(1), last_of(2)};
#pragma unroll 1
    for (int r = 0; r < table.world; ++r) {
      if (r == table.rank) continue;
      uint4* words = exchange.words(r, table.rank);
      if (has_own_) exchange.send(words + own_, {bits.x, bits.y, bits.z});
      if (has_shared_) exchange.send(words + shared_, shared);
    }
  }
  __device__ uint4 receive(const Exchange& exchange, const uint4* words) const {
    uint4 own{}, shared{};
    for (unsigned looks = 0;; ++looks) {
      if (has_own_) own = exchange.look(words + own_);
      if (has_shared_) shared = exchange.look(words + shared_);
      const bool there =
          (!has_own_ || exchange.is_new(own)) && (!has_shared_ || exchange.is_new(shared));
      if (there || exchange.stopped(looks)) break;
    }
    const auto part = [&](unsigned value) { return __shfl_sync(kFullMask, value, lane_ / 3); };
    const unsigned parts[] = {part(shared.x), part(shared.y), part(shared.z)};
    const int i = lane_ % 3;
    return {own.x, own.y, own.z, i == 0 ? parts[0] : i == 1 ? parts[1] : parts[2]};
  }

 private:
  static constexpr int kShared = (kWarp + 2) / 3;
  int lane_;
  bool has_own_, has_shared_;
  int64_t own_, shared_;
};

/// What all_reduce, then add_rms_norm (norm.cu) give, bit for bit: residual += sum of x, x =
/// norm(residual). A row is a block's, whose threads are those of add_rms_norm, kHeld vectors each
/// at most.
template <class T, int kHeld>
__global__ void __launch_bounds__(512, 2)  // all blocks run at once: a step's rows are one wave
    all_reduce_norm_kernel(T* x, T* residual, const T* w, int64_t rows, int64_t n, float eps,
                           const __grid_constant__ PeerTable table) {
  __shared__ float shared[kWarp];
  let_next_start();
  const int64_t vectors = n / Vec<T>::size;
  Vec<T> weights[kHeld];
  /// use(j, first, i): of the warp's first and of the thread's own vector.
  const auto held_by_warp = [&](auto&& use) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int64_t i = threadIdx.x + int64_t{j} * blockDim.x, first = i - threadIdx.x % kWarp;
      if (first < vectors) use(j, first, i);
    }
  };
  const auto held = [&](auto&& use) {
    held_by_warp([&](int j, int64_t, int64_t i) {
      if (i < vectors) use(j, i);
    });
  };
  held([&](int j, int64_t i) { weights[j] = reinterpret_cast<const Vec<T>*>(w)[i]; });
  wait_for_previous();
  Exchange exchange(table);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    auto* own = reinterpret_cast<Vec<T>*>(x + row * n);
    auto* stream = reinterpret_cast<Vec<T>*>(residual + row * n);
    Vec<T> values[kHeld] = {}, before[kHeld];
    exchange.begin_round();
    held_by_warp([&](int j, int64_t first, int64_t i) {
      if (i < vectors) values[j] = own[i];
      WarpVectors(first, vectors).send(exchange, table, reinterpret_cast<const uint4&>(values[j]));
      if (i < vectors) before[j] = stream[i];
    });
    float squares = 0.0f;
    held_by_warp([&](int j, int64_t first, int64_t i) {
      const Vec<T> sum = sum_over_ranks<T>(table.rank, table.world, values[j], [&](int r) {
        return WarpVectors(first, vectors).receive(exchange, exchange.words(table.rank, r));
      });
      if (i >= vectors) return;
#pragma unroll
      for (int k = 0; k < Vec<T>::size; ++k)
        values[j].v[k] = round_to<T>(to_float(before[j].v[k]) + to_float(sum.v[k]));
      stream[i] = values[j];
      squares = add_squares(squares, values[j]);
    });
    const float reciprocal = reciprocal_rms(block_sum(squares, shared), n, eps);
    held([&](int j, int64_t i) {
#pragma unroll
      for (int k = 0; k < Vec<T>::size; ++k)
        values[j].v[k] = normalise(values[j].v[k], reciprocal, weights[j].v[k]);
      own[i] = values[j];
    });
    __syncthreads();  // before the next row's sum, and before its words overtake this row's
  }
  exchange.end();
}

/// out [t, m] from every rank's part [t, n], in units; `count` is t * n.
template <class Unit>
__global__ void __launch_bounds__(kExchangeThreads)
    all_gather_kernel(Unit* out, const Unit* part, int64_t count, int64_t n, int64_t m,
                      int64_t chunk, const __grid_constant__ PeerTable table) {
  Exchange exchange(table);
  for (int64_t begin = blockIdx.x * chunk; begin < count; begin += gridDim.x * chunk) {
    const int64_t size = min(chunk, count - begin);
    exchange.begin_round();
    for (int64_t i = threadIdx.x; i < size; i += blockDim.x) {
      const Unit unit = part[begin + i];
      for (int r = 0; r < table.world; ++r)
        if (r != table.rank) reinterpret_cast<Unit*>(exchange.place(r, table.rank))[i] = unit;
    }
    exchange.meet();
    for (int r = 0; r < table.world; ++r) {
      const auto* from = reinterpret_cast<const Unit*>(exchange.place(table.rank, r));
      for (int64_t i = threadIdx.x; i < size; i += blockDim.x) {
        const int64_t row = (begin + i) / n, column = r * n + (begin + i) % n;
        if (column < m)
          out[row * m + column] = r == table.rank ? part[begin + i] : __ldcg(from + i);
      }
    }
  }
  exchange.end();
}

}  // namespace nanovllm
