#include "engine/step_graphs.h"

namespace nanovllm {
namespace {

// Each holds device memory of the driver's (a few hundred KB); beyond this many, steps run eagerly.
constexpr int64_t kMostGraphs = 256;

}  // namespace

bool StepGraphs::run(const StepInput& input, StepPart part, const std::function<void()>& body) {
  Entry& entry = entries_[{shape_of(input), input.sampler.params.features, part}];
  if (entry.graph && entry.graph->is_ready()) {
    entry.graph->launch();
    return true;
  }
  if (!entry.graph && entry.ran && num_recorded_ < kMostGraphs)  // from the second time on
    record(entry, body);
  entry.ran = true;
  body();
  return false;
}

bool StepGraphs::misses(const StepShape& shape, uint32_t features, StepPart part) const {
  if (num_recorded_ >= kMostGraphs) return false;
  const auto entry = entries_.find({shape, features, part});
  return entry == entries_.end() || !entry->second.graph;
}

void StepGraphs::record(const StepInput& input, StepPart part, const std::function<void()>& body) {
  record(entries_[{shape_of(input), input.sampler.params.features, part}], body);
}

void StepGraphs::record(Entry& entry, const std::function<void()>& body) {
  comm_.settle();
  entry.graph = ops_.capture(body);
  // Ranks must issue the same, and none may wait for its device while others wait for it.
  if (comm_.world_size() > 1) entry.graph->wait_until_ready();
  comm_.settle();
  ++num_recorded_;
}

}  // namespace nanovllm
