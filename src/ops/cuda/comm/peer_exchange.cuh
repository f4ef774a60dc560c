// Collectives over peer memory: every rank pushes its data into the other GPUs' memory, waits for
// theirs, and goes on with what lies in its own. Posted writes: no round trip over NVLink.
//
// Blocks are independent: block b of a rank talks to the blocks b of the others, through places of
// its own. A block waits for others, so all blocks of a launch must run at once, on every rank: a
// launch has most_blocks at most, which is asked of the GPUs at start. A round is one exchange of
// such blocks; rounds are counted, the counter lives on the device, so that a recorded graph can be
// replayed. Places alternate between two halves: who writes into a half again has heard every peer
// in the round between, which the peer began after it had read that half.
//
// Data travel in words of 14 bytes and 2 of the round's number, written and read in one piece: a
// seventh more bytes than data, but who reads a word knows that it has arrived, without a flag that
// might not leave before it.
//
// Sums run over the ranks in order, in f32, and are rounded once: the same bits on every rank,
// whatever the size of the message.
#pragma once

#include "ops/cuda/ptx/device.cuh"

namespace nanovllm {

constexpr int kMaxPeers = 8;
constexpr int kExchangeBlocks = 256;
constexpr int64_t kPlaceBytes = 32 << 10;  // one block's words of one round from one rank

/// Where the ranks' exchange memory lies, as this GPU sees it.
struct PeerTable {
  int rank = 0, world = 1;
  int most_blocks = kExchangeBlocks;   // that every rank's GPU runs at once; the same on all ranks
  std::byte* words[kMaxPeers] = {};    // [2 halves][world senders][kExchangeBlocks][kPlaceBytes]
  std::byte* layers[kMaxPeers] = {};   // decoder_layers()'s own
  unsigned* flags[kMaxPeers] = {};     // [world senders][kExchangeBlocks]: the last round met in
  unsigned* rounds = nullptr;          // own: [kExchangeBlocks]
  const volatile int* stop = nullptr;  // on the host: the group has failed, nobody will answer

  static size_t words_bytes(int world) {
    return size_t{2} * static_cast<size_t>(world) * kExchangeBlocks * kPlaceBytes;
  }
  /// For eight rows of 8192 elements, four times over, in words.
  static size_t layers_bytes(int world) { return static_cast<size_t>(world) << 20; }
};

__device__ inline void raise_flag(unsigned* flag, unsigned value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ inline unsigned read_flag(const unsigned* flag) {
  unsigned value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

/// 16 bytes of a peer's memory, or for a peer in one's own: written and read in one piece.
__device__ inline void send_piece(void* to, uint4 piece) {
  const uint64_t low = static_cast<uint64_t>(piece.y) << 32 | piece.x,
                 high = static_cast<uint64_t>(piece.w) << 32 | piece.z;
  asm volatile(
      "{ .reg .b128 word; mov.b128 word, {%1, %2};"
      " st.relaxed.sys.global.b128 [%0], word; }" ::"l"(to),
      "l"(low), "l"(high)
      : "memory");
}
__device__ inline uint4 read_piece(const uint4* from) {
  uint64_t low, high;
  asm volatile(
      "{ .reg .b128 word; ld.relaxed.sys.global.b128 word, [%2];"
      " mov.b128 {%0, %1}, word; }"
      : "=l"(low), "=l"(high)
      : "l"(from)
      : "memory");
  return {static_cast<unsigned>(low), static_cast<unsigned>(low >> 32), static_cast<unsigned>(high),
          static_cast<unsigned>(high >> 32)};
}

/// One block's side of its exchanges.
class Exchange {
 public:
  __device__ explicit Exchange(const PeerTable& table)
      : table_(table), round_(table.rounds[blockIdx.x]) {}

  /// For all threads.
  __device__ void begin_round() {
    if (++round_ % kRenewal == 0) renew();
  }
  /// Where rank `from`'s words of this round lie on rank `at`.
  __device__ uint4* words(int at, int from) const {
    return place_in(table_.words[at], round_ & 1, from);
  }
  /// A word, in one piece. The upper half of data.w is none of it.
  __device__ void send(uint4* to, uint4 data) const {
    send_piece(to, {data.x, data.y, data.z, __byte_perm(data.w, round_, 0x5410)});
  }
  /// Whether a word that was read is of this round.
  __device__ bool is_new(uint4 word) const { return word.w >> 16 == (round_ & 0xffff); }
  /// Whether who waits need not look any more: asked now and then, remembered for good.
  __device__ bool stopped(unsigned looks) const {
    if (!stopped_ && looks % 1024 == 1023) stopped_ = *table_.stop != 0;
    return stopped_;
  }
  /// Waits for a word; the upper half of its last quarter is no data.
  __device__ uint4 receive(const uint4* from) const {
    uint4 word = read_piece(from);
    for (unsigned looks = 0; !is_new(word) && !stopped(looks); ++looks) word = read_piece(from);
    return word;
  }
  __device__ void end() const {
    __syncthreads();
    if (threadIdx.x == 0) table_.rounds[blockIdx.x] = round_;
  }

 private:
  static constexpr unsigned kRenewal = 1 << 15;

  __device__ uint4* place_in(std::byte* memory, unsigned half, int from) const {
    const int64_t index =
        (static_cast<int64_t>(half) * table_.world + from) * kExchangeBlocks + blockIdx.x;
    return reinterpret_cast<uint4*>(memory + index * kPlaceBytes);
  }
  /// Tells the others that this block has come so far, and waits for theirs. For all threads.
  __device__ void meet() const {
    __syncthreads();
    const auto peer = static_cast<int>(threadIdx.x);
    const bool is_peer = peer < table_.world && peer != table_.rank;
    if (is_peer) {
      __threadfence_system();
      raise_flag(table_.flags[peer] + table_.rank * kExchangeBlocks + blockIdx.x, round_);
    }
    __syncwarp();
    if (is_peer) {
      const unsigned* theirs = table_.flags[table_.rank] + peer * kExchangeBlocks + blockIdx.x;
      for (unsigned looks = 0; static_cast<int>(read_flag(theirs) - round_) < 0; ++looks)
        if (stopped(looks)) break;
    }
    __syncthreads();
  }
  /// Now and then words are wiped, so that none of 2^16 rounds ago can be taken for a new one; a
  /// wiped one is of a round that has no words.
  __device__ void renew() {
    for (unsigned half = 0; half < 2; ++half)
      for (int from = 0; from < table_.world; ++from) {
        uint4* words = place_in(table_.words[table_.rank], half, from);
        for (auto i = threadIdx.x; i < kPlaceBytes / sizeof(uint4); i += blockDim.x)
          words[i] = uint4{};
      }
    meet();
    ++round_;
  }

  const PeerTable& table_;
  unsigned round_;
  mutable bool stopped_ = false;
};

/// The sum over ranks, in order, of vectors: `own` and, of the other ranks r, the bits theirs(r).
template <class T, class Theirs>
__device__ Vec<T> sum_over_ranks(int rank, int world, const Vec<T>& own, Theirs&& theirs) {
  float sum[Vec<T>::size];
  for (int r = 0; r < world; ++r) {
    const uint4 bits = r == rank ? reinterpret_cast<const uint4&>(own) : theirs(r);
    const auto& values = reinterpret_cast<const Vec<T>&>(bits);
#pragma unroll
    for (int lane = 0; lane < Vec<T>::size; ++lane)
      sum[lane] = r == 0 ? to_float(values.v[lane]) : sum[lane] + to_float(values.v[lane]);
  }
  Vec<T> result;
#pragma unroll
  for (int lane = 0; lane < Vec<T>::size; ++lane) result.v[lane] = round_to<T>(sum[lane]);
  return result;
}

/// x[i] = the sum over ranks; this rank's vectors are x, those of rank r begin at r * `distance` in
/// `parts`.
template <class T, int kThreads>
__global__ void __launch_bounds__(kThreads)
    sum_parts_kernel(Vec<T>* x, const uint4* parts, int64_t count, int64_t distance, int rank,
                     int world) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads)
    x[i] = sum_over_ranks<T>(rank, world, x[i], [&](int r) { return parts[r * distance + i]; });
}

}  // namespace nanovllm
