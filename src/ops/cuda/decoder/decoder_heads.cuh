// A head of a row's query, key or value in a warp, of the decoder layers' kernel: received as the
// projection made it, normalised and rotated as rotary.cu does it.
#pragma once

#include "ops/cuda/decoder/decoder_layers.cuh"

namespace nanovllm::decoder {

/// Four elements of a head: lane i has the elements 4i ..
struct HeadPart {
  uint32_t pair[2];
};

template <int kHeadDim>
struct HeadWorker {
  static constexpr int kLanes = kHeadDim / 4;  // that have a part of a head
  static_assert((kHeadDim & (kHeadDim - 1)) == 0 && kLanes <= kWarp);

  const Worker<kHeadDim>& w;
  int row, lane;

  /// Of head `head` of the row's q, k, v, as the projection made it: the eight elements of which
  /// this lane has half. Both lanes of a pair have all eight, for the sum of their squares.
  __device__ Packed receive(int head) const {
    const MatrixCut& qkv = w.a.cuts[kQkv];
    const int64_t first = qkv.words + (int64_t{row} * qkv.columns + head * kHeadDim) / 2;
    const Packed eight = Eight{}.receive(inbox(w.a, first + lane % kLanes / 2 * 4), w.epoch);
    __syncwarp();
    return eight;
  }
  /// This lane's half of them.
  __device__ HeadPart part_of(const Packed& eight) const {
    const bool second = lane % 2;
    return {{second ? eight.pair[2] : eight.pair[0], second ? eight.pair[3] : eight.pair[1]}};
  }

  /// 1 / the root mean square of a head. rotary.cu's sum: lanes of eight elements, the furthest
  /// first.
  __device__ float reciprocal_of(const Packed& eight) const {
    const float sum = lane_sum(add_squares(0.0f, eight), kLanes, 2);
    // Multiplying by 1 / kHeadDim is dividing.
    return reciprocal_of_mean(__fmul_rn(sum, 1.0f / kHeadDim), w.a.eps);
  }

  /// The rotation of this lane's elements: x = x * cosine + partner's * sine, the sine negative for
  /// those of the first half.
  struct Turn {
    float cosine[4], sine[4];
    int partner;
    bool turns;
  };
  __device__ Turn find_turn() const {
    const int half = w.a.half_rotary, lanes = half / 4;
    const bool is_first = lane < lanes;
    Turn t;
    t.turns = lane < 2 * lanes;
    t.partner = is_first ? lane + lanes : t.turns ? lane - lanes : lane;
    const int angle = is_first ? lane : t.turns ? lane - lanes : 0;
    const float* table = w.shared.of_row[row].cos_sin + angle * 4;
    const float4 c = *reinterpret_cast<const float4*>(table),
                 s = *reinterpret_cast<const float4*>(table + half);
    const float cosine[4] = {c.x, c.y, c.z, c.w}, sine[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      t.cosine[i] = cosine[i];
      t.sine[i] = is_first ? -sine[i] : sine[i];
    }
    return t;
  }
  __device__ void rotate(HeadPart& x, const Turn& t) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 mine = unpack(x.pair[i]),
                   other = unpack(__shfl_sync(kFullMask, x.pair[i], t.partner));
      const uint32_t turned =
          pack_bf16(__fmaf_rn(other.x, t.sine[2 * i], __fmul_rn(mine.x, t.cosine[2 * i])),
                    __fmaf_rn(other.y, t.sine[2 * i + 1], __fmul_rn(mine.y, t.cosine[2 * i + 1])));
      x.pair[i] = t.turns ? turned : x.pair[i];
    }
  }
};

}  // namespace nanovllm::decoder
