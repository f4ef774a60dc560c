// Collectives over peer memory: every rank pushes its data into inboxes on the other GPUs, raises a
// flag there, waits for theirs, and goes on with what lies in its own memory. Posted writes and one
// flag: no round trip over NVLink.
//
// Blocks are independent: block b of a rank talks to the blocks b of the others, through places of
// its own. A round is one exchange of such blocks; rounds are counted, the counter is the flag's
// value and lives on the device, so that a recorded graph can be replayed. Places alternate between
// two halves: who writes into a half again has seen every peer's flag of the round between, which
// the peer raised after it had read that half.
//
// Sums run over the ranks in order, in f32, and are rounded once: the same bits on every rank,
// whatever the size of the message.
#pragma once

#include "ops/cuda/device.cuh"

namespace nanovllm {

constexpr int kMaxPeers = 8;
constexpr int kExchangeBlocks =
    128;  // fewer than any GPU of architecture 8.0 or newer has room for
constexpr int kExchangeThreads = 256;
constexpr int64_t kPlaceBytes = 32 << 10;  // one block's data of one round from one rank

/// Where the ranks' exchange memory lies, as this GPU sees it.
struct PeerTable {
  int rank = 0, world = 1;
  std::byte* inbox[kMaxPeers] = {};    // [2 halves][world senders][kExchangeBlocks][kPlaceBytes]
  unsigned* flags[kMaxPeers] = {};     // [world senders][kExchangeBlocks]: the last round sent
  unsigned* rounds = nullptr;          // own: [kExchangeBlocks]
  const volatile int* stop = nullptr;  // on the host: the group has failed, nobody will answer

  static size_t inbox_bytes(int world) {
    return size_t{2} * static_cast<size_t>(world) * kExchangeBlocks * kPlaceBytes;
  }
};

__device__ inline void raise_flag(unsigned* flag, unsigned value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ inline unsigned read_flag(const unsigned* flag) {
  unsigned value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

/// One block's side of its exchanges.
class Exchange {
 public:
  __device__ explicit Exchange(const PeerTable& table)
      : table_(table), round_(table.rounds[blockIdx.x]) {}

  __device__ void begin_round() { ++round_; }
  /// Where rank `from`'s data of this round lie on rank `at`.
  __device__ uint4* place(int at, int from) const {
    const int64_t index =
        ((round_ & 1) * table_.world + from) * int64_t{kExchangeBlocks} + blockIdx.x;
    return reinterpret_cast<uint4*>(table_.inbox[at] + index * kPlaceBytes);
  }
  /// Tells the others that this block's data are with them, and waits for theirs. For all threads.
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
        if (looks % 1024 == 1023 && *table_.stop) break;
    }
    __syncthreads();
  }
  __device__ void end() const {
    __syncthreads();
    if (threadIdx.x == 0) table_.rounds[blockIdx.x] = round_;
  }

 private:
  const PeerTable& table_;
  unsigned round_;
};

/// The sum over ranks, in order, of the vectors at `i` of this round; `own` is this rank's.
template <class T>
__device__ Vec<T> sum_of_ranks(const Exchange& exchange, const PeerTable& table, const Vec<T>& own,
                               int64_t i) {
  float sum[Vec<T>::size];
  for (int r = 0; r < table.world; ++r) {
    // Not through the first-level cache, which does not see what peers write.
    const uint4 bits = r == table.rank ? reinterpret_cast<const uint4&>(own)
                                       : __ldcg(exchange.place(table.rank, r) + i);
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

}  // namespace nanovllm
