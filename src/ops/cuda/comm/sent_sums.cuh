// The sum over the ranks of what products have sent (sent_parts.cuh), with residual and norm.
#pragma once

#include "ops/cuda/comm/collectives.cuh"
#include "ops/cuda/comm/sent_parts.cuh"

namespace nanovllm {

/// Where ranks tell each other their shares of the sums, as they do the parts.
struct SentSums {
  SentParts parts;
  std::byte* sums[kMaxPeers] = {};     // of every rank: [2 halves][kMostSentRows][columns]
  const volatile int* stop = nullptr;  // as PeerTable's
};

/// One thread's vector of a row. It asks for the parts of kAtOnce ranks at once.
template <int kAtOnce>
class SentSum {
 public:
  /// `vector`: of the row.
  __device__ SentSum(const SentSums& table, unsigned half, int row, int vector)
      : table_(table), parts_(table.parts) {
    const int share = parts_.share / kSize, by = vector / share, first = static_cast<int>(half);
    owner_ = by;
    first_part_ = first * parts_.world * (kMostSentRows * share) +
                  place_of_part(row, (vector - by * share) * kSize, parts_.share) / kSize;
    sum_ = (first * kMostSentRows + row) * (parts_.columns / kSize) + vector;
  }
  /// Adds what this rank is to add, and tells the others. In f32 and in the order of ranks, rounded
  /// once.
  __device__ void add(Vec<__nv_bfloat16>& value) const {
    if (owner_ != parts_.rank) return;
    float sum[kSize];
    for (int r = 0; r < parts_.world; r += kAtOnce) {
      const int count = min(kAtOnce, parts_.world - r);
      uint4 part[kAtOnce];
      take(part, count, [&](int k) {
        return at(parts_.parts[parts_.rank],
                  first_part_ + (r + k) * (kMostSentRows * (parts_.share / kSize)));
      });
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (k >= count) break;
        const auto& values = reinterpret_cast<const Vec<__nv_bfloat16>&>(part[k]);
#pragma unroll
        for (int i = 0; i < kSize; ++i)
          sum[i] = r + k == 0 ? to_float(values.v[i]) : sum[i] + to_float(values.v[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) value.v[i] = round_to<__nv_bfloat16>(sum[i]);
    for (int i = 1; i < parts_.world; ++i) {
      const int r =
          parts_.rank + i < parts_.world ? parts_.rank + i : parts_.rank + i - parts_.world;
      send_piece(at(table_.sums[r], sum_), reinterpret_cast<const uint4&>(value));
    }
  }
  /// Takes what another rank has added.
  __device__ void receive(Vec<__nv_bfloat16>& value) const {
    if (owner_ == parts_.rank) return;
    uint4 sum[1];
    take(sum, 1, [&](int) { return at(table_.sums[parts_.rank], sum_); });
    value = reinterpret_cast<const Vec<__nv_bfloat16>&>(sum[0]);
  }

 private:
  static constexpr int kSize = Vec<__nv_bfloat16>::size;

  static __device__ uint4* at(std::byte* memory, int vector) {
    return reinterpret_cast<uint4*>(memory) + vector;
  }
  /// Waits for the vectors at place(0 .. count - 1), and wipes the places.
  template <int most, class Place>
  __device__ void take(uint4 (&vectors)[most], int count, Place&& place) const {
    bool there = false;
    for (unsigned looks = 0; !there; ++looks) {
#pragma unroll
      for (int k = 0; k < most; ++k)
        if (k < count) vectors[k] = read_piece(place(k));
      there = true;
#pragma unroll
      for (int k = 0; k < most; ++k)
        if (k < count)
          there = there && vectors[k].x != kAbsent && vectors[k].y != kAbsent &&
                  vectors[k].z != kAbsent && vectors[k].w != kAbsent;
      if (looks % 1024 == 1023 && *table_.stop != 0) break;
    }
#pragma unroll
    for (int k = 0; k < most; ++k)
      if (k < count) *place(k) = {kAbsent, kAbsent, kAbsent, kAbsent};
  }

  const SentSums& table_;
  const SentParts& parts_;
  int owner_, first_part_, sum_;
};

/// The result of all_reduce of the parts, then add_rms_norm (norm.cu), bit for bit: residual +=
/// sum, and norm(residual) to `end`. A row is a block's, whose threads are those of add_rms_norm,
/// kHeld vectors each at most. All blocks run at once (PeerTable::most_blocks).
template <int kHeld, class End>
__global__ void __launch_bounds__(512, 2)
    sum_sent_norm_kernel(const End end, __nv_bfloat16* residual, const __nv_bfloat16* w, float eps,
                         unsigned* arrivals, const __grid_constant__ SentSums table) {
  using V = Vec<__nv_bfloat16>;
  __shared__ float shared[kWarp];
  let_next_start();
  const int n = table.parts.columns, vectors = n / V::size, row = static_cast<int>(blockIdx.x);
  V weights[kHeld];
  const auto held = [&](auto&& use) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j)
      if (const int i = static_cast<int>(threadIdx.x + j * blockDim.x); i < vectors) use(j, i);
  };
  held([&](int j, int i) { weights[j] = reinterpret_cast<const V*>(w)[i]; });
  wait_for_previous();
  auto* stream = reinterpret_cast<V*>(residual + int64_t{row} * n);
  V values[kHeld] = {}, before[kHeld];
  const unsigned round = *static_cast<volatile unsigned*>(table.parts.round);
  held([&](int j, int i) { before[j] = stream[i]; });
  const auto sum_of = [&](int i) { return SentSum<4 / kHeld>(table, round & 1, row, i); };
  held([&](int j, int i) { sum_of(i).add(values[j]); });
  held([&](int j, int i) { sum_of(i).receive(values[j]); });
  float squares = 0.0f;
  held([&](int j, int i) {
    add_stream(values[j], before[j]);
    stream[i] = values[j];
    squares = add_squares(squares, values[j]);
  });
  end_row(end, row, n, squares, eps, values, weights, shared, held);
  // The last block to come here: all have read the round.
  if (threadIdx.x == 0 && atomicInc(arrivals, gridDim.x - 1) == gridDim.x - 1)
    *static_cast<volatile unsigned*>(table.parts.round) = round + 1;
}

}  // namespace nanovllm
