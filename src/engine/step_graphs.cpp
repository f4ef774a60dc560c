#include "engine/step_graphs.h"

namespace nanovllm {
namespace {

// Each holds device memory of the driver's (a few hundred KB); beyond this many, steps run eagerly.
constexpr int64_t kMostGraphs = 256;

}  // namespace

void StepGraphs::run(const StepInput& input, const std::function<void()>& body) {
  const SamplingBatch& sampling = input.sampler.params;
  Entry& entry = entries_[{input.batch.num_seqs(), input.batch.block_tables.shape[1],
                           sampling.all_greedy, sampling.any_filter}];
  if (entry.graph) return entry.graph->launch();
  if (entry.ran && num_recorded_ < kMostGraphs) {  // from the second time on
    comm_.settle();
    entry.graph = ops_.capture(body);
    comm_.settle();
    ++num_recorded_;
    return entry.graph->launch();
  }
  entry.ran = true;
  body();
}

}  // namespace nanovllm
