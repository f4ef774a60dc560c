#include "ranks/nccl_timing.h"

#include <chrono>
#include <stdexcept>
#include <string>

#include <cuda_runtime.h>
#include <nccl.h>

#include "core/seconds.h"
#include "ops/cuda/comm/nccl_library.h"

namespace nanovllm {
namespace {

void check_cuda(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

void check_nccl(ncclResult_t status) {
  if (status != ncclSuccess) throw std::runtime_error("NCCL: " + std::to_string(status));
}

}  // namespace

struct NcclTimer::State {
  int rank;
  std::function<void()> meet;
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
  void* memory = nullptr;
  NcclLibrary nccl{};
  decltype(&ncclAllReduce) all_reduce = nullptr;
  decltype(&ncclCommDestroy) destroy = nullptr;
};

NcclTimer::NcclTimer(int rank, int world_size, const std::function<void(void*, size_t)>& share,
                     std::function<void()> meet, int64_t most_bytes)
    : state_(new State{.rank = rank, .meet = std::move(meet)}) {
  check_cuda(cudaSetDevice(rank));
  check_cuda(cudaStreamCreateWithFlags(&state_->stream, cudaStreamNonBlocking));
  check_cuda(cudaMalloc(&state_->memory, static_cast<size_t>(most_bytes)));
  check_cuda(cudaMemset(state_->memory, 0, static_cast<size_t>(most_bytes)));
  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclCommInitRank) init_rank = nullptr;
  state_->nccl.find(get_unique_id, "ncclGetUniqueId");
  state_->nccl.find(init_rank, "ncclCommInitRank");
  state_->nccl.find(state_->all_reduce, "ncclAllReduce");
  state_->nccl.find(state_->destroy, "ncclCommDestroy");
  ncclUniqueId id{};
  if (rank == 0) check_nccl(get_unique_id(&id));
  share(&id, sizeof id);
  check_nccl(init_rank(&state_->comm, world_size, id, rank));
}

NcclTimer::~NcclTimer() {
  (void)cudaStreamSynchronize(state_->stream);
  (void)state_->destroy(state_->comm);
  (void)cudaFree(state_->memory);
  (void)cudaStreamDestroy(state_->stream);
}

double NcclTimer::time(int64_t bytes, int calls, int rounds) {
  using Clock = std::chrono::steady_clock;
  const auto sum = [&] {
    check_nccl(state_->all_reduce(state_->memory, state_->memory, static_cast<size_t>(bytes / 2),
                                  ncclBfloat16, ncclSum, state_->comm, state_->stream));
  };
  sum();  // the first of a kind connects the ranks
  check_cuda(cudaStreamSynchronize(state_->stream));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t instance = nullptr;
  check_cuda(cudaStreamBeginCapture(state_->stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < calls; ++i) sum();
  check_cuda(cudaStreamEndCapture(state_->stream, &graph));
  check_cuda(cudaGraphInstantiate(&instance, graph, 0));
  state_->meet();
  check_cuda(cudaGraphLaunch(instance, state_->stream));
  check_cuda(cudaStreamSynchronize(state_->stream));
  state_->meet();
  const auto begin = Clock::now();
  for (int i = 0; i < rounds; ++i) check_cuda(cudaGraphLaunch(instance, state_->stream));
  check_cuda(cudaStreamSynchronize(state_->stream));
  const double seconds = seconds_since(begin);
  state_->meet();
  check_cuda(cudaGraphExecDestroy(instance));
  check_cuda(cudaGraphDestroy(graph));
  return 1e6 * seconds / (calls * rounds);
}

}  // namespace nanovllm
