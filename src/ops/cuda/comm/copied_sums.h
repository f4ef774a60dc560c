// Sums over ranks beside the products, with the norm behind them: copy engines move the parts, on a
// stream of their own, while the multiprocessors go on. For many rows.
//
// Every rank has a share of the rows to make: the others copy their parts of them into its scratch
// memory, it adds those up in the order of the ranks, in f32, rounds once, adds the result to its
// rows of the residual stream, and copies their norm into the others' tensors. No kernel waits for
// another rank: streams wait for events, which are recorded before anybody is told to wait for
// them.
#pragma once

#include <array>
#include <vector>

#include "comm/communicator.h"
#include "ops/cuda/core/cuda_backend.h"

namespace nanovllm {

class CopiedSums {
 public:
  /// Collective, as are start() and finish(). GPUs reach each other's memory; `stream` is the
  /// backend's, which outlives this.
  CopiedSums(CudaBackend& backend, RankMeeting& meeting, int rank, cudaStream_t stream);
  ~CopiedSums();
  CopiedSums(const CopiedSums&) = delete;
  CopiedSums& operator=(const CopiedSums&) = delete;

  /// RankFusions::start_add_rms_norm(): x and residual are contiguous, of rows that a block holds.
  void start(int half, Tensor x, Tensor residual, Tensor w, float eps, bool whole);
  void finish(int half);

 private:
  /// The other ranks' view of this one.
  struct Half {
    Event sent, done;    // its parts lie with the others; the results of its share do
    std::byte* scratch;  // where the others' parts of its share go
  };
  struct Shown {
    std::array<Half, 2> halves;
    std::byte *x = nullptr, *residual = nullptr;  // what is being summed
  };
  /// Some rows of a start().
  struct Rows {
    Tensor x, residual, w;
    float eps;
    bool whole;
  };

  /// Where a share of `rows` begins.
  int64_t share(int64_t rows, int r) const { return rows * r / world_; }
  void exchange(int half, const Rows& rows);
  /// This rank's share of the sums, and their norm.
  void sum_and_norm(const Rows& share, const std::byte* parts, int64_t distance);
  void copy(std::byte* to, const std::byte* from, size_t bytes);
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
