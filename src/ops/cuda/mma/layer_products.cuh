// One kernel of all that a layer does between its attention and the next one's, for GPUs that have
// no kernel of all layers.
//
// Before sm_90 no kernel starts before the one before it has ended, so that at batch 1 memory idles
// at each boundary while blocks start, the first bytes come, and one chain of tensor core steps
// (docs/contract.md) is multiplied. Here one block per SM stays for four products. A warp has a
// ring of stages in shared memory for itself; it fills it by cp.async with its chains' weights in
// the order in which it will multiply them, across products, and so the next product's are there,
// or under way, while the blocks wait for each other's activations, which travel as words that say
// of which launch they are (decoder_words.cuh): the fence of a barrier would wait for the copies.
// No deadlock: the launch is cooperative, so all blocks run at once.
#pragma once

#include <cooperative_groups.h>

#include "ops/cuda/decoder/decoder_words.cuh"
#include "ops/cuda/mma/layer_weights.cuh"

namespace nanovllm::layer_products {

/// A sum as the separate operations leave it.
__device__ inline float rounded(float sum, const Element* bias, int column) {
  const float y = to_float(round_to<Element>(sum));
  return bias ? to_float(round_to<Element>(y + to_float(bias[column]))) : y;
}

/// Where a warp hands its rounded sums to the one that has a unit's first chain: of each lane a
/// pair, in turns in two places, since the one before may still be read.
using Handed = uint32_t[2][kWarps / 2][kWarp];

/// Ends a chain of product `p`. Of a unit's two the second warp hands its sums over, and the first
/// applies the gate or adds the halves of k.
__device__ inline void finish(const Arguments& a, int p, const float (&sum)[4], int unit,
                              bool is_second, uint32_t (&handed)[kWarps / 2][kWarp],
                              uint32_t epoch) {
  const Matrix& m = a.products[p];
  const bool gated = p == kGateUp, in_halves = m.is_pair() && !gated;
  const int warp = static_cast<int>(threadIdx.x) / kWarp,
            lane = static_cast<int>(threadIdx.x) % kWarp, row = lane / 4,
            column = unit * kUnit + lane % 4 * 2;
  const Element* bias = in_halves ? nullptr : m.bias;
  const int of_bias = column + (is_second ? m.n / 2 : 0);
  float y[2] = {rounded(sum[0], bias, of_bias), rounded(sum[1], bias, of_bias + 1)};
  if (m.is_pair()) {
    uint32_t& second = handed[warp / 2][lane];
    if (is_second) second = pack_bf16(y[0], y[1]);
    asm volatile("bar.sync %0, 64;" ::"r"(1 + warp / 2) : "memory");
    if (is_second) return;
    const float others[2] = {low_of(second), high_of(second)};
#pragma unroll
    for (int i = 0; i < 2; ++i)
      y[i] = gated ? silu_times(y[i], others[i]) : rounded(y[i] + others[i], m.bias, column + i);
  }
  if (row >= a.rows) return;
  const uint32_t pair = pack_bf16(y[0], y[1]);
  const int64_t at = (int64_t{row} * (gated ? m.n / 2 : m.n) + column) / 2;
  if (m.y)
    reinterpret_cast<uint32_t*>(m.y)[at] = pair;
  else
    decoder::send(m.words + at, decoder::tagged(pair, epoch));
}

/// Eight elements of what other blocks send. Between its questions a thread naps: who asks without
/// end keeps the L2 cache from those that are waited for.
__device__ inline Row receive(const uint64_t* words, uint32_t epoch) {
  decoder::Eight x;
  for (x.read(words); !x.there(epoch); x.read(words)) __nanosleep(kNap);
  const decoder::Packed values = x.values();
  return *reinterpret_cast<const Row*>(&values);
}
/// For a warp whose words begin here: its first lane alone asks whether results come by now.
__device__ inline void await(const uint64_t* words, uint32_t epoch) {
  if (threadIdx.x % kWarp == 0)
    while (!decoder::has(decoder::read_word(words), epoch)) __nanosleep(kNap);
  __syncwarp();
}

/// Rows of k elements, which an earlier kernel wrote, to shared memory: a part of the thread's next
/// group of copies.
__device__ inline void copy_rows(unsigned char* to, int pitch, const Element* from, int64_t stride,
                                 int rows, int k) {
  const int vectors = k / 8;
  for (int i = static_cast<int>(threadIdx.x); i < rows * vectors; i += kThreads) {
    const int row = i / vectors, c = i % vectors * 8;
    copy_async(to + row * pitch + c * 2, from + row * stride + c, true);
  }
}

/// Rows of k elements, which other blocks send.
__device__ inline void receive_rows(unsigned char* to, int pitch, const uint64_t* words, int rows,
                                    int k, uint32_t epoch) {
  const int vectors = k / 8, total = rows * vectors, first = static_cast<int>(threadIdx.x);
  if (const int of_warp = first / kWarp * kWarp; of_warp < total)
    await(words + int64_t{of_warp} * 4, epoch);
  for (int i = first; i < total; i += kThreads)
    *reinterpret_cast<Row*>(to + i / vectors * pitch + i % vectors * 16) =
        receive(words + int64_t{i} * 4, epoch);
}

/// stream += what a product sends; operand = norm(stream): the arithmetic and the tree of
/// add_rms_norm(), whose threads of a row are `norm_warps` warps here.
__device__ inline void add_and_normalise(const Arguments& a, unsigned char* operand,
                                         Element* stream, const uint64_t* words,
                                         const Element* weights, uint32_t epoch) {
  __shared__ float squares[kMostRows][kMostNormWarps];
  const int warp = static_cast<int>(threadIdx.x) / kWarp,
            lane = static_cast<int>(threadIdx.x) % kWarp, pitch = a.hidden * 2 + kOperandPad,
            wide = a.norm_warps * kWarp * 8, vectors = a.hidden / 8;
  const Row first_weights =
      load_vec(weights + static_cast<int>(threadIdx.x) % vectors * 8, 8, true);
  for (int i = warp; i < a.rows * a.norm_warps; i += kWarps) {
    const int row = i / a.norm_warps, of_row = i % a.norm_warps;
    float sum = 0.0f;
    if (of_row * kWarp * 8 < a.hidden)
      await(words + (int64_t{row} * a.hidden + of_row * kWarp * 8) / 2, epoch);
    for (int c = (of_row * kWarp + lane) * 8; c < a.hidden; c += wide) {
      Row x = receive(words + (int64_t{row} * a.hidden + c) / 2, epoch);
      auto& kept = *reinterpret_cast<Row*>(stream + row * a.hidden + c);
      add_stream(x, kept);
      kept = x;
      sum = add_squares(sum, x);
    }
    __syncwarp();
    sum = warp_sum(sum);
    if (lane == 0) squares[row][of_row] = sum;
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < a.rows * vectors; i += kThreads) {
    const int row = i / vectors, c = i % vectors * 8;
    float total = squares[row][0];
    for (int j = 1; j < a.norm_warps; ++j) total += squares[row][j];
    Row x = *reinterpret_cast<const Row*>(stream + row * a.hidden + c);
    normalise(x, reciprocal_rms(total, a.hidden, a.eps),
              i < kThreads ? first_weights : load_vec(weights + c, 8, true));
    *reinterpret_cast<Row*>(operand + row * pitch + c * 2) = x;
  }
}

/// A block's part of the work, and its shared memory behind the rings.
struct Block {
  Share shares[kProducts];
  unsigned char* operand;
  Element* stream;  // [rows, hidden]
};

/// Without a part in the products of the stream a block need not follow it.
__device__ inline bool follows_stream(const Block& block) {
  return blockIdx.x == 0 || block.shares[kGateUp].count + block.shares[kQkv].count > 0;
}

/// Asks for o's operand and the stream, which earlier kernels wrote: a group of copies.
__device__ inline void copy_first_operand(const Arguments& a, unsigned char* operand,
                                          Element* stream) {
  const int k = a.products[kOut].k;
  copy_rows(operand, k * 2 + kOperandPad, a.heads, k, a.rows, k);
  copy_rows(reinterpret_cast<unsigned char*>(stream), a.hidden * 2, a.stream, a.stream_stride,
            a.rows, a.hidden);
  commit_copies();
}

/// x of a later product, when it is there. By whole blocks.
__device__ inline void bring_operand(const Arguments& a, int product, const Block& block,
                                     uint32_t epoch) {
  const Matrix* m = a.products;
  const int k = m[product].k;
  __syncthreads();  // the operand before has been read
  if (product == kDown) {
    if (block.shares[kDown].count > 0)
      receive_rows(block.operand, k * 2 + kOperandPad, m[kGateUp].words, a.rows, k, epoch);
  } else if (follows_stream(block)) {
    const bool first = product == kGateUp;
    add_and_normalise(a, block.operand, block.stream, m[first ? kOut : kDown].words,
                      first ? a.post_norm : a.next_norm, epoch);
  }
  __syncthreads();
}

/// Behind the last epoch they start again; then nothing may be left of the old ones.
__device__ inline void renew(const Arguments& a, uint32_t epoch) {
  if (epoch >= a.last_epoch) {
    cooperative_groups::this_grid().sync();
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < a.total_words;
         i += int64_t{gridDim.x} * kThreads)
      a.all_words[i] = 0;
    epoch = 0;
  }
  __syncthreads();
  if (threadIdx.x == 0) a.epochs[blockIdx.x] = epoch;
}

template <int kStages>
__global__ void __launch_bounds__(kThreads, 1)
    layer_products_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ uint4 zeros[kDepth * sizeof(Element) / sizeof(uint4)];
  __shared__ Block block;
  __shared__ Handed handed;
  const uint32_t epoch = a.epochs[blockIdx.x] + 1;
  if (threadIdx.x < std::size(zeros)) zeros[threadIdx.x] = {};
  auto* const stream = reinterpret_cast<Element*>(memory + kWarps * kStages * kStageBytes);
  auto* const operand = reinterpret_cast<unsigned char*>(stream + a.rows * a.hidden);
  // The operand that o waits for comes first: copies on their way keep later ones waiting.
  copy_first_operand(a, operand, stream);
  if (threadIdx.x / kWarp == 1) {
    divide(block.shares, a);
    block.stream = stream;
    block.operand = operand;
  }
  __syncthreads();
  Ring<kStages> ring(memory, a, block.shares);
  const bool begins = ring.supply.product == kOut;
  if (begins) {
    ring.fill(0, kStages);
    wait_copies<kStages>();
  } else {
    wait_copies<0>();
  }
  __syncthreads();
  // The words of the first exchange wait for what the block asks for before them.
  constexpr int kAtOnce = kStages - 2;
  if (!begins) ring.fill(0, kAtOnce);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  int side = 0;  // of `handed`
#pragma unroll 1
  for (int product = kOut; product < a.count; ++product) {
    if (product > kOut) bring_operand(a, product, block, epoch);
    if (product == kGateUp && !begins) ring.fill(kAtOnce, kStages);
    const Matrix& m = a.products[product];
    const Share& share = block.shares[product];
#pragma unroll 1
    for (int i = share.of_warp(); i < share.count; i += kWarps) {
      const bool is_second = m.is_pair() && i % 2 == 1;
      const int first = is_second && product != kGateUp ? m.chain : 0;
      const bool has_row = lane % 8 < a.rows;
      const uint32_t x = has_row ? shared_place(block.operand + lane % 8 * (m.k * 2 + kOperandPad) +
                                                lane / 8 * 16 + first * 2)
                                 : shared_place(zeros);
      float sum[4] = {};
      multiply(sum, ring, x, has_row ? kDepth * sizeof(Element) : 0, m.chain);
      finish(a, product, sum, share.first + (m.is_pair() ? i / 2 : i), is_second, handed[side],
             epoch);
      if (m.is_pair()) side ^= 1;
    }
  }
  if (blockIdx.x == 0)
    for (int i = static_cast<int>(threadIdx.x) * 8; i < a.rows * a.hidden; i += kThreads * 8)
      store_whole(a.next_stream + i / a.hidden * a.next_stride + i % a.hidden,
                  *reinterpret_cast<const Row*>(block.stream + i));
  renew(a, epoch);
}

}  // namespace nanovllm::layer_products
