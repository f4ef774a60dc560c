// Communicator: what tensor parallelism needs from the other ranks. One per rank; calls are
// collective and in the same order everywhere.
#pragma once

#include <memory>

#include "core/tensor.h"

namespace nanovllm {

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  /// x = sum over ranks, added in rank order: the same bits on every rank and in every run.
  virtual void all_reduce(Tensor x) = 0;
  /// out [t, world * n]: every rank's x [t, n] side by side, on every rank.
  virtual void all_gather(Tensor out, Tensor x) = 0;
};

/// The world of one rank: nothing to do.
class SingleCommunicator final : public Communicator {
 public:
  int rank() const override { return 0; }
  int world_size() const override { return 1; }
  void all_reduce(Tensor) override {}
  void all_gather(Tensor, Tensor) override {}
};

}  // namespace nanovllm
