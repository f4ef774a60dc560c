// Owners of CUDA objects, each the size of a pointer, and the one way in which CUDA's status codes
// become exceptions.
#pragma once

#include <memory>
#include <source_location>
#include <string_view>
#include <type_traits>

#include <cublasLt.h>
#include <cuda_runtime.h>

#include "core/check.h"

namespace nanovllm {

template <class Handle, auto Destroy>
struct Release {
  void operator()(Handle handle) const noexcept {
    (void)Destroy(handle);
  }  // a destructor never throws
};
template <class Handle, auto Destroy>
using Owner = std::unique_ptr<std::remove_pointer_t<Handle>, Release<Handle, Destroy>>;

using Stream = Owner<cudaStream_t, cudaStreamDestroy>;
using Event = Owner<cudaEvent_t, cudaEventDestroy>;
using RawGraph = Owner<cudaGraph_t, cudaGraphDestroy>;
using GraphExec = Owner<cudaGraphExec_t, cudaGraphExecDestroy>;
using BlasLt = Owner<cublasLtHandle_t, cublasLtDestroy>;

/// The last component of a path: what an error message needs of a source location.
constexpr std::string_view file_name(std::string_view path) {
  return path.substr(path.find_last_of('/') + 1);
}

inline void cuda_check(cudaError_t status,
                       std::source_location where = std::source_location::current()) {
  if (status == cudaSuccess) [[likely]]
    return;
  (void)cudaGetLastError();  // a status that is not sticky must not be found again by the next call
  fail(ErrorKind::engine, "CUDA: {} ({}) at {}:{}", cudaGetErrorString(status),
       cudaGetErrorName(status), file_name(where.file_name()), where.line());
}

inline void cublas_check(cublasStatus_t status,
                         std::source_location where = std::source_location::current()) {
  if (status == CUBLAS_STATUS_SUCCESS) [[likely]]
    return;
  fail(ErrorKind::engine, "cuBLASLt: {} at {}:{}", cublasLtGetStatusString(status),
       file_name(where.file_name()), where.line());
}

/// A stream that waits for no other.
inline Stream make_stream() {
  cudaStream_t stream = nullptr;
  cuda_check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return Stream(stream);
}

/// An event that orders work and takes no time.
inline Event make_event() {
  cudaEvent_t event = nullptr;
  cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return Event(event);
}

}  // namespace nanovllm
