// Micro-batches: streams that fork from the first and join it again, by events, which a recording
// turns into the edges of its graph.
#include "ops/cuda/core/micro_batches.h"

#include "ops/cuda/core/cuda_backend.h"

namespace nanovllm {

// The first micro-batch opens first: what is allocated is zeroed on its stream.
void CudaBackend::open_micro_batch(MicroBatch& micro_batch) {
  micro_batch.stream = make_stream();
  micro_batch.fence = make_event();
  micro_batch.blas_workspace = allocate(GemmAlgorithms::kWorkspace);
  micro_batch.partials = allocate(kPartialBytes);
  micro_batch.plans = allocate(kPlanBytes);
  micro_batch.prefill_counters = allocate(2 * sizeof(int));
  micro_batch.step_plans.reserve(kMaxPlans);
}

int CudaBackend::micro_batches_for(const DecodeSize& size) const {
  return other_sms_ > 0 ? decode_micro_batches(size) : 1;
}

void CudaBackend::run_micro_batches(int micro_batches, const std::function<void(int)>& body) {
  check(1 <= micro_batches && micro_batches <= kMostMicroBatches && !runs_micro_batches_,
        "{} micro-batches of {}", micro_batches, kMostMicroBatches);
  // Where SMs are not divided nothing is gained, and quantised operands have room for one.
  if (other_sms_ == 0) return Backend::run_micro_batches(micro_batches, body);
  use_device();
  const auto used = std::span(micro_batches_).first(static_cast<size_t>(micro_batches));
  MicroBatch& first = used.front();
  cuda_check(cudaEventRecord(first.fence.get(), first.stream.get()));
  for (MicroBatch& micro_batch : used.subspan(1))
    cuda_check(cudaStreamWaitEvent(micro_batch.stream.get(), first.fence.get(), 0));
  struct Restore {
    CudaBackend& backend;
    ~Restore() {
      backend.micro_batch_ = backend.micro_batches_.data();
      backend.runs_micro_batches_ = false;
    }
  };
  {
    const Restore after{*this};
    runs_micro_batches_ = micro_batches > 1;
    for (micro_batch_ = &first; micro_batch_ != &first + micro_batches; ++micro_batch_)
      body(static_cast<int>(micro_batch_ - &first));
  }
  for (MicroBatch& micro_batch : used.subspan(1)) {
    cuda_check(cudaEventRecord(micro_batch.fence.get(), micro_batch.stream.get()));
    cuda_check(cudaStreamWaitEvent(first.stream.get(), micro_batch.fence.get(), 0));
  }
}

}  // namespace nanovllm
