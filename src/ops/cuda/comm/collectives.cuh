// The kernels of communicator.cu. Each is one launch, for data of any size: blocks take one piece
// after another, whose words have room in kPlaceBytes.
#pragma once

#include "ops/cuda/comm/peer_exchange.cuh"
#include "ops/cuda/rowwise/norm_rows.cuh"

namespace nanovllm {

/// How a warp's vectors, one of 16 bytes in each lane, travel in words of 14: a lane's first 14
/// bytes are a word, and the last two of seven lanes are one more, which a lane of the first sends.
/// All words of the first kind come first.
class WarpVectors {
 public:
  /// Words for so many vectors.
  static constexpr int64_t words(int64_t vectors) {
    return vectors + ceil_div(vectors, int64_t{kWarp}) * kShared;
  }
  /// The vectors from `first` on, a multiple of kWarp, of `count` in all; for all lanes.
  __device__ WarpVectors(int first, int count) : lane_(threadIdx.x % kWarp) {
    const int present = min(kWarp, count - first);
    has_own_ = lane_ < present;
    has_shared_ = lane_ < (present + kSharers - 1) / kSharers;
    own_ = first + lane_;
    shared_ = count + first / kWarp * kShared + lane_;
  }
  /// To the ranks from `begin` to `end` - 1, but for this one.
  __device__ void send(const Exchange& exchange, const PeerTable& table, uint4 bits, int begin,
                       int end) const {
    // The ends of this lane and of the next.
    const unsigned ends = __byte_perm(bits.w, __shfl_down_sync(kFullMask, bits.w, 1), 0x7632);
    const auto ends_of = [&](int i) { return __shfl_sync(kFullMask, ends, kSharers * lane_ + i); };
    const uint4 shared{ends_of(0), ends_of(2), ends_of(4), ends_of(6)};
#pragma unroll 1
    for (int r = begin; r < end; ++r) {
      if (r == table.rank) continue;
      uint4* words = exchange.words(r, table.rank);
      if (has_own_) exchange.send(words + own_, bits);
      if (has_shared_) exchange.send(words + shared_, shared);
    }
  }
  __device__ uint4 receive(const Exchange& exchange, const uint4* words) const {
    uint4 own{}, shared{};
    for (unsigned looks = 0;; ++looks) {
      if (has_own_) own = read_piece(words + own_);
      if (has_shared_) shared = read_piece(words + shared_);
      const bool there =
          (!has_own_ || exchange.is_new(own)) && (!has_shared_ || exchange.is_new(shared));
      if (there || exchange.stopped(looks)) break;
    }
    const auto ends = [&](unsigned value) {
      return __shfl_sync(kFullMask, value, lane_ / kSharers);
    };
    const unsigned of[] = {ends(shared.x), ends(shared.y), ends(shared.z), ends(shared.w)};
    const int i = lane_ % kSharers;
    const unsigned two = i < 2 ? of[0] : i < 4 ? of[1] : i < 6 ? of[2] : of[3];
    return {own.x, own.y, own.z, __byte_perm(own.w, two, i % 2 == 0 ? 0x5410 : 0x7610)};
  }

 private:
  static constexpr int kSharers = 7, kShared = (kWarp + kSharers - 1) / kSharers;
  int lane_;
  bool has_own_, has_shared_;
  int own_, shared_;
};

/// The sum over ranks of a warp's vectors: send(), sum() and receive() in this order, with those of
/// other vectors between them. Every rank gets all and sums for itself; or, where `by` is not -1,
/// that rank sums for all: 2 / world of the bytes, but twice over the wire.
template <class T>
class WarpSum {
 public:
  __device__ WarpSum(const Exchange& exchange, const PeerTable& table, int first, int count, int by)
      : exchange_(exchange), table_(table), vectors_(first, count), by_(by) {}
  __device__ void send(const Vec<T>& value) const {
    vectors_.send(exchange_, table_, bits_of(value), by_ < 0 ? 0 : by_,
                  by_ < 0 ? table_.world : by_ + 1);
  }
  __device__ void sum(Vec<T>& value) const {
    if (by_ >= 0 && by_ != table_.rank) return;
    value = sum_over_ranks<T>(table_.rank, table_.world, value, [&](int r) { return from(r); });
    if (by_ >= 0) vectors_.send(exchange_, table_, bits_of(value), 0, table_.world);
  }
  __device__ void receive(Vec<T>& value) const {
    if (by_ < 0 || by_ == table_.rank) return;
    const uint4 bits = from(by_);
    value = reinterpret_cast<const Vec<T>&>(bits);
  }

 private:
  static __device__ uint4 bits_of(const Vec<T>& value) {
    return reinterpret_cast<const uint4&>(value);
  }
  __device__ uint4 from(int r) const {
    return vectors_.receive(exchange_, exchange_.words(table_.rank, r));
  }

  const Exchange& exchange_;
  const PeerTable& table_;
  WarpVectors vectors_;
  int by_;
};

constexpr int kSumThreads = 512;

/// x = the sum over ranks, a vector to a thread, in words. `shares`: each of the ranks sums a part
/// for all, where a block's vectors are enough: then every rank hears every other in every round.
template <class T>
__global__ void __launch_bounds__(kSumThreads, 2)
    all_reduce_kernel(Vec<T>* x, int64_t count, bool shares,
                      const __grid_constant__ PeerTable table) {
  Exchange exchange(table);
  for (int64_t begin = int64_t{blockIdx.x} * kSumThreads; begin < count;
       begin += int64_t{gridDim.x} * kSumThreads) {
    const int size = static_cast<int>(min(int64_t{kSumThreads}, count - begin)),
              first = static_cast<int>(threadIdx.x) / kWarp * kWarp,
              i = static_cast<int>(threadIdx.x), pieces = (size + kWarp - 1) / kWarp;
    exchange.begin_round();
    if (first < size) {
      const bool by_one = shares && pieces >= table.world;
      const WarpSum<T> sum(exchange, table, first, size,
                           by_one ? first / kWarp * table.world / pieces : -1);
      Vec<T> value{};
      if (i < size) value = x[begin + i];
      sum.send(value);
      sum.sum(value);
      sum.receive(value);
      if (i < size) x[begin + i] = value;
    }
    __syncthreads();  // before the next round's words overtake this one's
  }
  exchange.end();
}

/// Normalises a row of n elements, of which a thread has the vectors that held(use) names, and
/// hands them to `end`. One that quantises takes rows of whole warps. For all threads.
template <class End, class T, int kHeld, class Held>
__device__ void end_row(const End& end, int64_t row, int64_t n, float squares, float eps,
                        Vec<T> (&values)[kHeld], const Vec<T> (&weights)[kHeld], float* shared,
                        Held&& held) {
  const float reciprocal = reciprocal_rms(block_sum(squares, shared), n, eps);
  held([&](int j, int) { normalise(values[j], reciprocal, weights[j]); });
  float most = 0.0f;
  if constexpr (End::kNeedsMost) most = most_of_row(values);
  held([&](int j, int i) {
    end.put(static_cast<unsigned>(row), i * Vec<T>::size, values[j], most);
  });
}

/// The result of all_reduce, then add_rms_norm (norm.cu), bit for bit: residual += sum of x, and
/// norm(residual) to `end`. A row is a block's, whose threads are those of add_rms_norm, kHeld
/// vectors each at most. kShares: every rank sums some warps' vectors of each row for all
/// (WarpSum), and hears every other in every round.
template <class T, int kHeld, bool kShares, class End>
__global__ void __launch_bounds__(512, 2)  // on 128 SMs and more a step's rows are one wave
    all_reduce_norm_kernel(const End end, const T* x, T* residual, const T* w, int64_t rows,
                           int64_t n, float eps, const __grid_constant__ PeerTable table) {
  __shared__ float shared[kWarp];
  let_next_start();
  const int vectors = static_cast<int>(n) / Vec<T>::size, pieces = (vectors + kWarp - 1) / kWarp;
  Vec<T> weights[kHeld];
  /// use(j, first, i): of the warp's first and of the thread's own vector.
  const auto held_by_warp = [&](auto&& use) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int i = static_cast<int>(threadIdx.x + j * blockDim.x), first = i / kWarp * kWarp;
      if (first < vectors) use(j, first, i);
    }
  };
  const auto held = [&](auto&& use) {
    held_by_warp([&](int j, int, int i) {
      if (i < vectors) use(j, i);
    });
  };
  held([&](int j, int i) { weights[j] = reinterpret_cast<const Vec<T>*>(w)[i]; });
  wait_for_previous();
  Exchange exchange(table);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const auto* own = reinterpret_cast<const Vec<T>*>(x + row * n);
    auto* stream = reinterpret_cast<Vec<T>*>(residual + row * n);
    Vec<T> values[kHeld] = {}, before[kHeld];
    exchange.begin_round();
    const auto sum_of = [&](int first) {
      return WarpSum<T>(exchange, table, first, vectors,
                        kShares ? first / kWarp * table.world / pieces : -1);
    };
    held_by_warp([&](int j, int first, int i) {
      if (i < vectors) values[j] = own[i];
      sum_of(first).send(values[j]);
      if (i < vectors) before[j] = stream[i];
    });
    held_by_warp([&](int j, int first, int) { sum_of(first).sum(values[j]); });
    held_by_warp([&](int j, int first, int) { sum_of(first).receive(values[j]); });
    float squares = 0.0f;
    held([&](int j, int i) {
      add_stream(values[j], before[j]);
      stream[i] = values[j];
      squares = add_squares(squares, values[j]);
    });
    end_row(end, row, n, squares, eps, values, weights, shared, held);
    __syncthreads();  // before the next row's sum, and before its words overtake this row's
  }
  exchange.end();
}

/// out [t, m] from every rank's part [t, n], four values to a thread; `count` is t * n. `wide`:
/// four neighbours are of one row, and lie on 16 bytes.
__global__ void __launch_bounds__(kSumThreads)
    all_gather_kernel(float* out, const float* part, int64_t count, int64_t n, int64_t m, bool wide,
                      const __grid_constant__ PeerTable table) {
  constexpr int kValues = 4;
  Exchange exchange(table);
  const int64_t vectors = (count + kValues - 1) / kValues;
  for (int64_t begin = int64_t{blockIdx.x} * kSumThreads; begin < vectors;
       begin += int64_t{gridDim.x} * kSumThreads) {
    const int size = static_cast<int>(min(int64_t{kSumThreads}, vectors - begin)),
              first = static_cast<int>(threadIdx.x) / kWarp * kWarp;
    exchange.begin_round();
    if (first < size) {
      const WarpVectors mine(first, size);
      const int64_t i = (begin + threadIdx.x) * kValues;
      const auto left = threadIdx.x < size ? count - i : 0;
      const Vec<float> own = load_vec(part + (left > 0 ? i : 0), left, wide);
      mine.send(exchange, table, reinterpret_cast<const uint4&>(own), 0, table.world);
      for (int r = 0; r < table.world; ++r) {
        const uint4 bits = r == table.rank ? reinterpret_cast<const uint4&>(own)
                                           : mine.receive(exchange, exchange.words(table.rank, r));
        const auto& values = reinterpret_cast<const Vec<float>&>(bits);
        if (wide) {
          const int64_t column = r * n + i % n;
          if (left > 0 && column < m) *reinterpret_cast<uint4*>(out + i / n * m + column) = bits;
          continue;
        }
#pragma unroll
        for (int v = 0; v < kValues; ++v) {
          const int64_t row = (i + v) / n, column = r * n + (i + v) % n;
          if (v < left && column < m) out[row * m + column] = values.v[v];
        }
      }
    }
    __syncthreads();  // before the next round's words overtake this one's
  }
  exchange.end();
}

}  // namespace nanovllm
