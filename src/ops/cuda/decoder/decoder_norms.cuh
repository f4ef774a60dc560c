// The norms of the decoder layers' kernel: every block has the residual stream and normalises it
// for itself.
#pragma once

#include "ops/cuda/decoder/decoder_fp8.cuh"
#include "ops/cuda/decoder/decoder_ranks.cuh"

namespace nanovllm::decoder {

/// The sum over a row, from its warps' parts, in their order; 1 / its root mean square.
template <int kHeadDim>
__device__ __forceinline__ float reciprocal_of(const Worker<kHeadDim>& w, int row) {
  const Arguments& a = w.a;
  float total = 0.0f;
  const auto add_part = [&](int i) {
    const float4 part = w.shared.of_row[row].squares[i];
    total = total + part.x + part.y + part.z + part.w;
  };
  if (w.single)
#pragma unroll
    for (int i = 0; i < kWarps / 4; ++i) add_part(i);
  else
#pragma unroll 1
    for (int i = 0; i < a.norm_threads; i += 4 * kWarp) add_part(i / (4 * kWarp));
  const float mean = a.inverse_hidden > 0.0f ? __fmul_rn(total, a.inverse_hidden)
                                             : __fdiv_rn(total, static_cast<float>(a.hidden));
  return reciprocal_of_mean(mean, a.eps);
}

/// add_and_normalise() where a thread has one vector of a row at most: straight code, and what can
/// be read early is.
template <class Worker>
__device__ __forceinline__ void normalise_held(Worker& w, int product, uint32_t epoch,
                                               const __nv_bfloat16* weights) {
  const Arguments& a = w.a;
  const int own = w.ready_thread(), row = own / a.norm_threads, thread = own % a.norm_threads,
            c = thread * 8;
  const bool present = row < w.rows() && c < a.hidden;
  uint32_t residual = shared_address(w.residual + row * a.hidden + c),
           operand = shared_address(&w.operand_at(a.cuts[kQkv], row, c));
  find_now(residual);
  find_now(operand);
  Packed weight{}, values{};
  if (present) {
    weight = load_early(weights + c);
    const int64_t at = (int64_t{row} * a.hidden + c) / 2;
    if (product < 0) {
      values = *reinterpret_cast<const Packed*>(a.residual + row * a.residual_stride + c);
    } else if (w.one_rank || a.world == 1) {
      values = load_shared(residual);
      add(values, Eight{}.receive(inbox(a, a.cuts[product].words + at), epoch));
    } else {
      const Packed more = receive_output(a, product, at, epoch);
      values = load_shared(residual);
      add(values, more);
    }
  }
  if (row < w.rows()) {
    const float sum = warp_sum(add_squares(0.0f, values));
    if (own % kWarp == 0)
      reinterpret_cast<float*>(w.shared.of_row[row].squares)[thread / kWarp] = sum;
  }
  w.norm_together();
  if constexpr (Worker::kIsFp8) {
    Packed normal = values;
    if (present) normalise(normal, reciprocal_of(w, row), weight);
    put_normal(w, row, thread, present, normal);
    fence_shared_for_async();
    if (present) store_shared(residual, values);
  } else if (present) {
    Packed normal = values;
    normalise(normal, reciprocal_of(w, row), weight);
    store_shared(operand, normal);
    fence_shared_for_async();
    store_shared(residual, values);
  }
}

/// add_and_normalise() of a single row by the last four warps, so that those that multiply prepare
/// meanwhile. A thread has the elements of four of norm.cu's.
template <class Worker>
__device__ __forceinline__ void normalise_apart(Worker& w, int product, uint32_t epoch,
                                                const __nv_bfloat16* weights) {
  const Arguments& a = w.a;
  const int own = this_thread() - (kThreads - kNormThreads);
  uint32_t missing = 0;
#pragma unroll
  for (int j = 0; j < kNormParts; ++j)
    if ((own + j * kNormThreads) * 8 < a.hidden) missing |= 1u << j;
  uint32_t residual = shared_address(w.residual + own * 8),
           operand = shared_address(&w.operand_at(a.cuts[kQkv], 0, own * 8));
  find_now(residual);
  find_now(operand);
  const auto for_parts = [&](const auto& body) {
#pragma unroll
    for (int j = 0; j < kNormParts; ++j)
      if (missing >> j & 1) body(j, (own + j * kNormThreads) * 8, j * kNormThreads * 16u);
  };
  Packed weight[kNormParts] = {}, values[kNormParts] = {};
  for_parts([&](int j, int c, uint32_t) { weight[j] = load_early(weights + c); });
  if (product < 0) {
    for_parts([&](int j, int c, uint32_t) {
      values[j] = *reinterpret_cast<const Packed*>(a.residual + c);
    });
  } else {
    Eight more[kNormParts] = {};
    const uint64_t* from = inbox(a, a.cuts[product].words + own * 4);
    receive_all(more, missing, epoch, [&](int j) { return from + j * kNormThreads * 4; });
    for_parts([&](int j, int, uint32_t further) {
      values[j] = load_shared(residual + further);
      add(values[j], more[j].values());
    });
  }
#pragma unroll
  for (int j = 0; j < kNormParts; ++j) {
    const float sum = warp_sum(add_squares(0.0f, values[j]));
    if (own % kWarp == 0)
      reinterpret_cast<float*>(w.shared.of_row[0].squares)[(own + j * kNormThreads) / kWarp] = sum;
  }
  w.norm_together();
  const float reciprocal = reciprocal_of(w, 0);
  for_parts([&](int j, int, uint32_t further) {
    Packed normal = values[j];
    normalise(normal, reciprocal, weight[j]);
    store_shared(operand + further * w.places(), normal);
    store_shared(residual + further, values[j]);
  });
  fence_shared_for_async();
}

/// normalise_held() for two rows to a thread, of one rank.
template <int kHeadDim>
__device__ __forceinline__ void normalise_two(Worker<kHeadDim>& w, int product, uint32_t epoch,
                                              const __nv_bfloat16* weights) {
  const Arguments& a = w.a;
  const int own = w.ready_thread(), row = own / a.norm_threads, thread = own % a.norm_threads,
            lane = own % kWarp, c = thread * 8, at_once = kThreads / a.norm_threads,
            apart = at_once * a.hidden,
            rows = row >= at_once || row >= a.rows ? 0
                   : row + at_once < a.rows        ? 2
                                                   : 1;
  const bool present = c < a.hidden;
  uint32_t residual = shared_address(w.residual + row * a.hidden + c);
  uint32_t operand[2] = {shared_address(&w.operand_at(a.cuts[kQkv], row, c)),
                         shared_address(&w.operand_at(a.cuts[kQkv], row + at_once, c))};
  find_now(residual);
  find_now(operand[0]);
  find_now(operand[1]);
  Packed weight{}, values[2] = {}, more[2];
  if (present) weight = load_early(weights + c);
  if (product >= 0)
    receive_rows(more,
                 inbox(a, a.cuts[product].words + (int64_t{row} * a.hidden + c - lane * 8) / 2),
                 apart / 2, rows, a.hidden - (c - lane * 8), lane, epoch);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if (j >= rows) break;
    if (present && product < 0) {
      values[j] = *reinterpret_cast<const Packed*>(a.residual +
                                                   (row + j * at_once) * a.residual_stride + c);
    } else if (present) {
      values[j] = load_shared(residual + j * apart * 2);
      add(values[j], more[j]);
    }
    const float sum = warp_sum(add_squares(0.0f, values[j]));
    if (lane == 0)
      reinterpret_cast<float*>(w.shared.of_row[row + j * at_once].squares)[thread / kWarp] = sum;
  }
  w.norm_together();
  if (!present) return;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if (j >= rows) break;
    Packed normal = values[j];
    normalise(normal, reciprocal_of(w, row + j * at_once), weight);
    store_shared(operand[j], normal);
    store_shared(residual + j * apart * 2, values[j]);
  }
  fence_shared_for_async();
}

/// add_and_normalise()'s first half for a thread's vectors of all its rows, which are asked for
/// together: residual += the output of `product`, and the sums of squares.
template <int kHeadDim>
__device__ __forceinline__ void add_rows(Worker<kHeadDim>& w, int product, uint32_t epoch,
                                         int first_row, int at_once, int thread) {
  constexpr int kRows = 2;
  const Arguments& a = w.a;
  const int of_lane = thread % kWarp * 8;
#pragma unroll 1
  for (int row = first_row; row < a.rows; row += kRows * at_once) {
    float sum[kRows] = {};
#pragma unroll 1
    for (int c = thread * 8; c - of_lane < a.hidden; c += a.norm_threads * 8) {
      Packed more[kRows];
      receive_rows(more,
                   inbox(a, a.cuts[product].words + (int64_t{row} * a.hidden + c - of_lane) / 2),
                   at_once * a.hidden / 2, ceil_div(a.rows - row, at_once),
                   a.hidden - (c - of_lane), this_thread() % kWarp, epoch);
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        if (row + j * at_once >= a.rows || c >= a.hidden) break;
        auto& kept = *reinterpret_cast<Packed*>(w.residual + (row + j * at_once) * a.hidden + c);
        Packed values = kept;
        add(values, more[j]);
        kept = values;
        sum[j] = add_squares(sum[j], values);
      }
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      if (row + j * at_once >= a.rows) break;
      const float total = warp_sum(sum[j]);
      auto* squares = reinterpret_cast<float*>(w.shared.of_row[row + j * at_once].squares);
      if (thread % kWarp == 0) squares[thread / kWarp] = total;
    }
  }
}

/// residual += the output of o or down (`product` < 0: nothing, it is the embedding's); the operand
/// is its norm. The threads that share a row, and the order of its sum, are norm.cu's.
template <class Worker>
__device__ __forceinline__ void add_and_normalise(Worker& w, int product, uint32_t epoch,
                                                  const __nv_bfloat16* weights) {
  const Arguments& a = w.a;
  const int own = w.ready_thread(), threads = a.norm_threads, thread = own % threads,
            step = threads * 8;
  const int at_once = kThreads / threads,
            row0 = own / threads;  // at_once and above: none
  if constexpr (Worker::kHasSingleRow) return normalise_apart(w, product, epoch, weights);
  if (w.alone || (a.rows <= at_once && a.hidden <= step))
    return normalise_held(w, product, epoch, weights);
  if (w.many && a.world == 1 && a.rows <= 2 * at_once && a.hidden <= step)
    return normalise_two(w, product, epoch, weights);
  const int first_row = row0 < at_once ? row0 : a.rows;
  const auto residual = [&](int row, int c) -> Packed& {
    return *reinterpret_cast<Packed*>(w.residual + row * a.hidden + c);
  };
  Packed first_weight{};
  if (thread * 8 < a.hidden) first_weight = load_early(weights + thread * 8);
  const bool received = product >= 0 && a.world == 1;
  if (received) add_rows(w, product, epoch, first_row, at_once, thread);
  for (int row = received ? a.rows : first_row; row < a.rows; row += at_once) {
    float sum = 0.0f;
    for (int c = thread * 8; c < a.hidden; c += step) {
      Packed values;
      if (product < 0) {
        values = *reinterpret_cast<const Packed*>(a.residual + row * a.residual_stride + c);
      } else {
        const Packed more = receive_output(a, product, (int64_t{row} * a.hidden + c) / 2, epoch);
        values = residual(row, c);
        add(values, more);
      }
      residual(row, c) = values;
      sum = add_squares(sum, values);
    }
    sum = warp_sum(sum);
    if (own % kWarp == 0)
      reinterpret_cast<float*>(w.shared.of_row[row].squares)[thread / kWarp] = sum;
  }
  w.norm_together();
  if constexpr (Worker::kIsFp8) put_normals(w, weights, first_weight, first_row == 0, thread);
  for (int row = Worker::kIsFp8 ? a.rows : first_row; row < a.rows; row += at_once) {
    const float reciprocal = reciprocal_of(w, row);
    for (int c = thread * 8; c < a.hidden; c += step) {
      Packed values = residual(row, c), weight = first_weight;
      if (c != thread * 8) weight = *reinterpret_cast<const Packed*>(weights + c);
      normalise(values, reciprocal, weight);
      w.operand_at(a.cuts[kQkv], row, c) = values;
    }
  }
  fence_shared_for_async();
}

}  // namespace nanovllm::decoder
