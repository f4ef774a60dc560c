// The words by which the blocks of the decoder layers' kernel exchange results: four bytes of data
// and four of the epoch that tells whether they are there, so that no barrier is needed.
#pragma once

#include "ops/cuda/decoder/decoder_packed.cuh"

namespace nanovllm::decoder {

__device__ inline uint64_t tagged(uint32_t data, uint32_t epoch) {
  return static_cast<uint64_t>(epoch) << 32 | data;
}
__device__ inline bool has(uint64_t word, uint32_t epoch) {
  return static_cast<uint32_t>(word >> 32) == epoch;
}
__device__ inline void send(uint64_t* to, uint64_t word) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}
__device__ inline void send(uint64_t* to, uint64_t first, uint64_t second) {
  asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(first), "l"(second)
               : "memory");
}
__device__ inline uint64_t read_word(const uint64_t* from) {
  uint64_t word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  return word;
}

/// Two words, 16-byte aligned; each is read in one piece.
struct WordPair {
  uint64_t first, second;
  __device__ void read(const uint64_t* from) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(first), "=l"(second)
                 : "l"(from)
                 : "memory");
  }
  __device__ bool there(uint32_t epoch) const { return has(first, epoch) && has(second, epoch); }
};

/// Eight elements of an activation: four words.
struct Eight {
  WordPair low, high;
  __device__ void read(const uint64_t* from) {
    low.read(from);
    high.read(from + 2);
  }
  __device__ bool there(uint32_t epoch) const { return low.there(epoch) && high.there(epoch); }
  /// Asks for all words again while one is missing: none then waits for another's way.
  __device__ Packed receive(const uint64_t* from, uint32_t epoch) {
    while (!there(epoch)) read(from);
    return values();
  }
  __device__ Packed values() const {
    return {static_cast<uint32_t>(low.first), static_cast<uint32_t>(low.second),
            static_cast<uint32_t>(high.first), static_cast<uint32_t>(high.second)};
  }
};

/// Asks for what is `missing`, a bit for each of `words`, until all of it is there. from(j): where
/// words[j] are.
template <class Words, int kCount, class From>
__device__ __forceinline__ void receive_all(Words (&words)[kCount], uint32_t missing,
                                            uint32_t epoch, From&& from) {
  while (missing) {
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      if (missing >> j & 1) words[j].read(from(j));
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      if (words[j].there(epoch)) missing &= ~(1u << j);
  }
}

/// Eight elements of each lane from what its warp read, of 32 lanes' in a row: a lane has the pair
/// of words of its number, and of that + 32.
__device__ __forceinline__ Packed spread(const WordPair& low, const WordPair& high) {
  const int lane = threadIdx.x % kWarp;
  const auto take = [&](uint64_t of_low, uint64_t of_high, int from) {
    const uint32_t first = __shfl_sync(kFullMask, static_cast<uint32_t>(of_low), from),
                   second = __shfl_sync(kFullMask, static_cast<uint32_t>(of_high), from);
    return lane < kWarp / 2 ? first : second;
  };
  Packed x;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int from = (2 * lane + i) % kWarp;
    x.pair[2 * i] = take(low.first, high.first, from);
    x.pair[2 * i + 1] = take(low.second, high.second, from);
  }
  return x;
}

/// Eight elements of each lane of some rows' outputs of o or down, each row `apart` words behind
/// the one before: the warp asks for 512 bytes in a row at a time, of all `rows` rows together.
/// `from`: the first lane's; `left`: elements from there to the rows' end. By whole warps.
template <int kRows>
__device__ __forceinline__ void receive_rows(Packed (&x)[kRows], const uint64_t* from, int apart,
                                             int rows, int left, int lane, uint32_t epoch) {
  constexpr int kInARow = 4 * kWarp;  // elements
  WordPair pair[2 * kRows] = {};
  uint32_t missing = 0;
#pragma unroll
  for (int j = 0; j < 2 * kRows; ++j)
    if (j / 2 < rows && lane * 4 + j % 2 * kInARow < left) missing |= 1u << j;
  from += lane * 2;
  receive_all(pair, missing, epoch,
              [&](int j) { return from + j / 2 * apart + j % 2 * kInARow / 2; });
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kRows; ++j) x[j] = spread(pair[2 * j], pair[2 * j + 1]);
}

}  // namespace nanovllm::decoder
