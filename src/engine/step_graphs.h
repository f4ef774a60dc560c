// StepGraphs: the decode steps that were recorded (CUDA graphs), by what their launches depend on.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <tuple>

#include "comm/communicator.h"
#include "engine/batch_builder.h"
#include "ops/backend.h"

namespace nanovllm {

class StepGraphs {
 public:
  StepGraphs(Backend& ops, Communicator& comm) : ops_(ops), comm_(comm) {}

  /// Issues a step of `input`, padded to a StepShape, whose operations `body` issues. The first
  /// step of a kind runs eagerly, so that what operations prepare once is done; the second is
  /// recorded, and replayed as soon as the graph is ready. `body` must issue the same operations on
  /// the same addresses whenever the sizes in `input` are the same. True: it was replayed.
  bool run(const StepInput& input, const std::function<void()>& body);
  /// Whether steps of `shape`, sampled as `sampling` says, are not recorded but may be.
  bool misses(const StepShape& shape, const SamplingBatch& sampling) const;
  /// Records a step of `input` without running it. Only where others like it have run: what
  /// operations prepare once should be done.
  void record(const StepInput& input, const std::function<void()>& body);

 private:
  /// Rows, columns of the block tables, and which sampling operations run.
  using Key = std::tuple<int64_t, int64_t, bool, bool>;
  struct Entry {
    bool ran = false;  // eagerly, once
    std::unique_ptr<Graph> graph;
  };

  static Key key(const StepShape& shape, const SamplingBatch& sampling) {
    return {shape.num_seqs, shape.max_blocks, sampling.all_greedy, sampling.any_filter};
  }
  static Key key(const StepInput& input) {
    return key({input.batch.num_seqs(), input.batch.block_tables.shape[1]}, input.sampler.params);
  }
  void record(Entry& entry, const std::function<void()>& body);

  Backend& ops_;
  Communicator& comm_;
  std::map<Key, Entry> entries_;
  int64_t num_recorded_ = 0;
};

}  // namespace nanovllm
