// Barriers in shared memory that count arrivals (mbarrier): a phase ends when as many have arrived
// as the barrier was set up for, and the next begins. Whoever waits names the phase by its parity.
#pragma once

#include <cstdint>

namespace nanovllm {

__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/// By one thread, before a barrier of the block that makes it known to the others.
__device__ inline void init_barrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;"
               :
               : "r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}
__device__ inline void arrive(uint64_t* barrier) {
  [[maybe_unused]] uint64_t state;
  asm volatile("mbarrier.arrive.shared.b64 %0, [%1];"
               : "=l"(state)
               : "r"(shared_address(barrier))
               : "memory");
}
/// Arrives for several (sm_90).
__device__ inline void arrive(uint64_t* barrier, uint32_t times) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(shared_address(barrier)), "r"(times)
               : "memory");
}
/// Arrives when all copies that this thread has begun with copy_async() are done.
__device__ inline void arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];"
               :
               : "r"(shared_address(barrier))
               : "memory");
}
/// Whether the phase of this parity has ended.
__device__ inline bool has_ended(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, "
      "p;\n}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done;
}

/// Waits for the end of the phase of this parity: 0 for the first, 1 for the second, and so on. The
/// parity before the first phase counts as ended.
__device__ inline void wait_barrier(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, "
        "p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
#else
    done = has_ended(barrier, parity);
#endif
  }
}

/// A barrier among `threads` threads of the block, whole warps; `name`: 1 .. 15.
template <int name, int threads>
__device__ void sync_threads() {
  asm volatile("bar.sync %0, %1;" ::"n"(name), "n"(threads) : "memory");
}
/// Arrives at such a barrier without waiting.
template <int name, int threads>
__device__ void arrive_at() {
  asm volatile("bar.arrive %0, %1;" ::"n"(name), "n"(threads) : "memory");
}
/// The same of a barrier whose name is known only when it runs.
__device__ inline void sync_some(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
__device__ inline void arrive_at_some(int name, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

/// A place in a ring of stages, each with barriers: the stage, and the parity of the phase in which
/// it is filled.
struct RingCursor {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void next(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
  __device__ RingCursor plus(int n, int stages) const {
    RingCursor later{stage + n, parity};
    while (later.stage >= stages) {
      later.stage -= stages;
      later.parity ^= 1;
    }
    return later;
  }
  /// The same, at most a round further on.
  __device__ RingCursor ahead(int n, int stages) const {
    const int later = stage + n;
    return later < stages ? RingCursor{later, parity} : RingCursor{later - stages, parity ^ 1};
  }
};

/// A ring of stages in shared memory, each with a barrier for its bytes and one for its readers.
struct StageRing {
  unsigned char* data;
  int stage_bytes;
  uint64_t *full, *empty;
  __device__ unsigned char* at(int stage) const { return data + stage * stage_bytes; }
};

/// One whose stages hold weights and, behind them, rows.
struct ProductRing : StageRing {
  int weight_bytes;
  __device__ unsigned char* weight(int stage) const { return at(stage); }
  __device__ unsigned char* rows(int stage) const { return at(stage) + weight_bytes; }
};

}  // namespace nanovllm
