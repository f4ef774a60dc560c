// Sums over ranks beside the products: copy engines move the parts, on a stream of their own, while
// the multiprocessors go on. For many rows.
//
// Every rank has the sum of a share of the elements to make: the others copy their parts of it into
// its scratch memory, it adds them up in the order of the ranks, in f32, rounds once, and copies
// the sum into the others' tensors. No kernel waits for another rank: streams wait for events,
// which are recorded before anybody is told to wait for them.
#pragma once

#include <array>
#include <vector>

#include "comm/communicator.h"
#include "ops/cuda/cuda_backend.h"

namespace nanovllm {

class CopiedSums {
 public:
  /// Collective, as are start() and finish(). GPUs reach each other's memory; `stream` is the
  /// backend's, which outlives this.
  CopiedSums(CudaBackend& backend, RankMeeting& meeting, int rank, cudaStream_t stream);
  ~CopiedSums();
  CopiedSums(const CopiedSums&) = delete;
  CopiedSums& operator=(const CopiedSums&) = delete;

  /// Communicator::start_all_reduce(): x is contiguous, of whole 16 bytes.
  void start(int half, Tensor x);
  void finish(int half);

 private:
  /// What the other ranks see of this one.
  struct Half {
    Event sent, done;    // its parts lie with the others; the sums of its share do
    std::byte* scratch;  // where the others' parts of its share go
  };
  struct Shown {
    std::array<Half, 2> halves;
    std::byte* x = nullptr;  // what is being summed
  };

  /// Where a share of `vectors` begins.
  int64_t share(int64_t vectors, int r) const { return vectors * r / world_; }
  void exchange(int half, std::byte* x, int64_t vectors, DType dtype);
  void copy(std::byte* to, const std::byte* from, int64_t vectors);
  void wait_for(cudaStream_t stream, Event Half::*event, int half) const;

  RankMeeting& meeting_;
  const int device_, rank_, world_;
  const cudaStream_t stream_;
  Stream copies_;
  Event ready_;
  Buffer scratch_;
  Shown own_;
  std::vector<const Shown*> ranks_;
};

}  // namespace nanovllm
