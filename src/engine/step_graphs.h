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

/// The part of a step that is issued at once: a step, or its layers and, when its token masks are
/// there, its sampling.
enum class StepPart { whole, forward, sampling };

class StepGraphs {
 public:
  StepGraphs(Backend& ops, Communicator& comm) : ops_(ops), comm_(comm) {}

  /// Issues a part of a step of `input`, padded to a StepShape, whose operations `body` issues. The
  /// first of a kind runs eagerly, so that what operations prepare once is done; the second is
  /// recorded, and replayed as soon as the graph is ready. `body` must issue the same operations on
  /// the same addresses whenever the sizes in `input` are the same. True: it was replayed.
  bool run(const StepInput& input, StepPart part, const std::function<void()>& body);
  /// Whether steps of `shape`, whose sampling has `features`, are not recorded but may be.
  bool misses(const StepShape& shape, uint32_t features, StepPart part) const;
  /// Records a step of `input` without running it. Only where others like it have run: what
  /// operations prepare once should be done.
  void record(const StepInput& input, StepPart part, const std::function<void()>& body);

 private:
  /// The sizes of all tensors, and SamplingBatch::features: which sampling operations run.
  using Key = std::tuple<StepShape, uint32_t, StepPart>;
  struct Entry {
    bool ran = false;  // eagerly, once
    std::unique_ptr<Graph> graph;
  };

  void record(Entry& entry, const std::function<void()>& body);

  Backend& ops_;
  Communicator& comm_;
  std::map<Key, Entry> entries_;
  int64_t num_recorded_ = 0;
};

}  // namespace nanovllm
