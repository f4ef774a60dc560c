// The module's entry points.
#include <cstdio>

#include "comm/cuda_module.h"
#include "core/load_module.h"
#include "ops/cuda/comm/communicator.h"
#include "ops/cuda_module.h"
#include "ops/gemm_question.h"

extern "C" __attribute__((visibility("default"))) nanovllm::Backend* nanovllm_open_cuda(
    const char* version, int index, char* error, size_t error_size) {
  return nanovllm::made_by_module(nanovllm::kCudaModuleFile, version, error, error_size,
                                  [&] { return std::make_unique<nanovllm::CudaBackend>(index); });
}

namespace nanovllm {
namespace {

void write_text(const char* text, char* to, size_t size) {
  if (size > 0) std::snprintf(to, size, "%s", text);
}

std::unique_ptr<Communicator> connect(CudaBackend& backend, RankMeeting& meeting, int rank) {
  if (all_reach_each_other(backend, meeting, rank))
    return make_peer_communicator(backend, meeting, rank);
#ifdef NANOVLLM_NCCL
  NcclId id{};
  if (rank == 0) id = new_nccl_id();
  meeting.show(rank, &id);
  meeting.barrier(rank);
  id = *static_cast<const NcclId*>(meeting.shown_by(0));
  meeting.barrier(rank);
  return make_nccl_communicator(backend, id, rank, meeting.world_size(), &meeting);
#else
  fail(ErrorKind::device,
       "the GPUs cannot reach each other's memory (NVLink, or PCIe with peer-to-peer enabled), and "
       "the CUDA module was built without NCCL");
#endif
}

}  // namespace
}  // namespace nanovllm

extern "C" __attribute__((visibility("default"))) nanovllm::Communicator*
nanovllm_open_cuda_communicator(const char* version, nanovllm::Backend* backend,
                                nanovllm::RankMeeting* meeting, int rank, char* error,
                                size_t error_size) {
  return nanovllm::made_by_module(nanovllm::kCudaModuleFile, version, error, error_size, [&] {
    auto& gpu = dynamic_cast<nanovllm::CudaBackend&>(*backend);
    gpu.expect_ranks();
    return nanovllm::connect(gpu, *meeting, rank);
  });
}

extern "C" __attribute__((visibility("default"))) void nanovllm_limit_cuda(
    nanovllm::Backend* backend, const nanovllm::CudaLimits* limits) {
  dynamic_cast<nanovllm::CudaBackend&>(*backend).limit(*limits);
}

extern "C" __attribute__((visibility("default"))) int nanovllm_compare_gemm(
    nanovllm::Backend* backend, nanovllm::GemmComparison* comparison) {
  try {
    *comparison = dynamic_cast<nanovllm::CudaBackend&>(*backend).compare_algorithms();
    return 0;
  } catch (...) {
    return 1;
  }
}

extern "C" __attribute__((visibility("default"))) void nanovllm_explain_gemm(
    nanovllm::Backend* backend, const nanovllm::GemmQuestion* question, char* text, size_t size) {
  using namespace nanovllm;
  const GemmProblem problem{.end = question->is_gated ? GemmEnd::gate : GemmEnd::store,
                            .weight = question->weight,
                            .y = question->f32_out ? DType::f32 : DType::bf16,
                            .rows = question->rows,
                            .n = question->n,
                            .k = question->k};
  try {
    write_text(dynamic_cast<CudaBackend&>(*backend).explain(problem).c_str(), text, size);
  } catch (const std::exception& failure) {
    write_text(failure.what(), text, size);
  }
}

static_assert(std::is_same_v<decltype(nanovllm_explain_gemm), nanovllm::ExplainGemmFunction>);
static_assert(std::is_same_v<decltype(nanovllm_open_cuda), nanovllm::OpenCudaFunction>);
static_assert(std::is_same_v<decltype(nanovllm_limit_cuda), nanovllm::LimitCudaFunction>);
static_assert(std::is_same_v<decltype(nanovllm_compare_gemm), nanovllm::CompareGemmFunction>);
static_assert(
    std::is_same_v<decltype(nanovllm_open_cuda_communicator), nanovllm::OpenCommunicatorFunction>);

#ifdef NANOVLLM_NCCL
extern "C" __attribute__((visibility("default"))) int nanovllm_new_nccl_id(nanovllm::NcclId* id,
                                                                           char* error,
                                                                           size_t error_size) {
  try {
    *id = nanovllm::new_nccl_id();
    return 0;
  } catch (const std::exception& failure) {
    nanovllm::write_text(failure.what(), error, error_size);
    return 1;
  }
}

extern "C" __attribute__((visibility("default"))) nanovllm::Communicator*
nanovllm_open_nccl_communicator(const char* version, nanovllm::Backend* backend,
                                const nanovllm::NcclId* id, int rank, int world_size, char* error,
                                size_t error_size) {
  return nanovllm::made_by_module(nanovllm::kCudaModuleFile, version, error, error_size, [&] {
    auto& gpu = dynamic_cast<nanovllm::CudaBackend&>(*backend);
    gpu.expect_ranks();
    return nanovllm::make_nccl_communicator(gpu, *id, rank, world_size, nullptr);
  });
}

static_assert(std::is_same_v<decltype(nanovllm_new_nccl_id), nanovllm::NewNcclIdFunction>);
static_assert(std::is_same_v<decltype(nanovllm_open_nccl_communicator),
                             nanovllm::OpenNcclCommunicatorFunction>);
#endif
