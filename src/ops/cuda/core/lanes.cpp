// Lanes: streams that fork from the first and join it again, by events, which a recording turns
// into the edges of its graph.
#include "ops/cuda/core/lanes.h"

#include "ops/cuda/core/cuda_backend.h"

namespace nanovllm {

// The first lane opens first: what is allocated is zeroed on its stream.
void CudaBackend::open_lane(Lane& lane) {
  lane.stream = make_stream();
  lane.fence = make_event();
  lane.blas_workspace = allocate(GemmAlgorithms::kWorkspace);
  lane.partials = allocate(kPartialBytes);
  lane.plans = allocate(kPlanBytes);
  lane.prefill_counters = allocate(2 * sizeof(int));
  lane.step_plans.reserve(kMaxPlans);
}

int CudaBackend::lanes_for(const DecodeSize& size) const {
  return lane_sms_ > 0 ? decode_lanes(size) : 1;
}

void CudaBackend::run_lanes(int lanes, const std::function<void(int)>& body) {
  check(1 <= lanes && lanes <= kMostLanes && !runs_lanes_, "{} lanes of {}", lanes, kMostLanes);
  use_device();
  const auto used = std::span(lanes_).first(static_cast<size_t>(lanes));
  Lane& first = used.front();
  cuda_check(cudaEventRecord(first.fence.get(), first.stream.get()));
  for (Lane& lane : used.subspan(1))
    cuda_check(cudaStreamWaitEvent(lane.stream.get(), first.fence.get(), 0));
  struct Restore {
    CudaBackend& backend;
    ~Restore() {
      backend.lane_ = backend.lanes_.data();
      backend.runs_lanes_ = false;
    }
  };
  {
    const Restore after{*this};
    runs_lanes_ = lanes > 1;
    for (lane_ = &first; lane_ != &first + lanes; ++lane_) body(static_cast<int>(lane_ - &first));
  }
  for (Lane& lane : used.subspan(1)) {
    cuda_check(cudaEventRecord(lane.fence.get(), lane.stream.get()));
    cuda_check(cudaStreamWaitEvent(first.stream.get(), lane.fence.get(), 0));
  }
}

}  // namespace nanovllm
