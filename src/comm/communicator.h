// Communicator: what tensor parallelism needs from the other ranks, two verbs; and RankFusions, by
// which a device does more at once. One per rank; calls are collective and in the same order
// everywhere. On a GPU they are ordered on the backend's stream and can be recorded in
// graphs.
//
// Every rank ends a call with the same bits: ranks that sample from gathered logits cannot diverge.
#pragma once

#include <functional>

#include "core/sampling_batch.h"
#include "core/weight.h"

namespace nanovllm {

/// Operations that a device may do in one with the exchange beside them. Each answers false, and
/// does nothing, where there is no such kernel or it does not take these sizes, on all ranks alike:
/// the caller then calls what it stands for, which defines the result bit for bit.
class RankFusions {
 public:
  virtual ~RankFusions() = default;
  /// The backend's gemm(y, x, w), whose results go from the product straight to where ranks sum
  /// them: y is undefined until the next call, which is all_reduce_add_rms_norm(y, ...).
  virtual bool gemm_for_sum(Tensor y, Tensor x, Weight w) {
    return (void)y, (void)x, (void)w, false;
  }
  /// all_reduce(x) and, of the backend's operations, add_rms_norm(x, residual, x, w, eps, reader).
  /// x, residual [t, n]; w [n].
  virtual bool all_reduce_add_rms_norm(Tensor x, Tensor residual, Tensor w, float eps,
                                       Weight reader = {}) {
    return (void)x, (void)residual, (void)w, (void)eps, (void)reader, false;
  }
  /// From how many rows on a step should be done in halves (start_add_rms_norm()); 0: never.
  virtual int64_t rows_worth_halving() const { return 0; }
  /// all_reduce_add_rms_norm() beside what the backend does until finish_half(half), before which
  /// neither x nor residual may be touched. `half`: 0 or 1; each must be finished before it is
  /// started again. Unless `whole`, a rank then has only its share of residual's rows, the same
  /// ones in every call of that shape.
  virtual bool start_add_rms_norm(int half, Tensor x, Tensor residual, Tensor w, float eps,
                                  bool whole) {
    return (void)half, (void)x, (void)residual, (void)w, (void)eps, (void)whole, false;
  }
  virtual void finish_half(int half) { (void)half; }
  /// Whether the backend's decoder_layers() sums over the ranks by itself, all but the last layer's
  /// output: of that it leaves this rank's part in x.
  virtual bool sums_in_decoder_layers() { return false; }
  /// Backend::sample() of the ranks' logits side by side, without gathering them: `logits` f32
  /// [rows, n] are this rank's columns, of which those from `vocab_size` on are padding.
  virtual bool sample(Tensor token_ids, Tensor logits, int64_t vocab_size,
                      const SamplingBatch& params) {
    return (void)token_ids, (void)logits, (void)vocab_size, (void)params, false;
  }
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  /// x = sum over ranks, added in f32 in rank order and rounded once: the same bits on every rank
  /// and in every run. x: f32 or bf16, contiguous.
  virtual void all_reduce(Tensor x) = 0;
  /// out [t, m] = the ranks' [t, n] side by side, cut off after m of world * n columns. On entry
  /// parts[rank] of `parts` [world, t, n] holds this rank's columns; the rest of it is scratch.
  /// Both contiguous, one dtype.
  virtual void all_gather(Tensor out, Tensor parts) = 0;
  virtual RankFusions& fusions() { return no_fusions_; }

  /// Returns when all ranks have launched what came before, so that nothing under way waits for
  /// work that is not launched yet. Called before and after calls for which a driver waits until
  /// the device is idle, which otherwise might never be.
  virtual void settle() {}
  /// Ends, for good, all waits of this rank's device for other ranks; from any thread.
  virtual void abort() {}

 private:
  RankFusions no_fusions_;
};

/// How the ranks of one process find each other. Shared by them.
class RankMeeting {
 public:
  virtual ~RankMeeting() = default;
  virtual int world_size() const = 0;
  /// Returns when all ranks have called it as often as this one. Throws Error if the group has
  /// failed, or fails it when a rank does not come.
  virtual void barrier(int rank) = 0;
  /// Shows a pointer to the other ranks, who may read it between two barriers.
  virtual void show(int rank, void* pointer) = 0;
  virtual void* shown_by(int rank) const = 0;
  /// Runs once, on the thread that fails the group or, if it has failed already, here. It ends
  /// waits that are not at the barrier. Must not throw.
  virtual void on_failure(std::function<void()> wake) = 0;
};

/// The world of one rank: nothing to do.
class SingleCommunicator final : public Communicator {
 public:
  int rank() const override { return 0; }
  int world_size() const override { return 1; }
  void all_reduce(Tensor) override {}
  void all_gather(Tensor, Tensor) override {}
};

/// Stands for one rank of many where only shapes matter: memory planning.
class NullCommunicator final : public Communicator {
 public:
  NullCommunicator(int rank, int world_size) : rank_(rank), world_size_(world_size) {}
  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  void all_reduce(Tensor) override {}
  void all_gather(Tensor, Tensor) override {}

 private:
  int rank_, world_size_;
};

}  // namespace nanovllm
