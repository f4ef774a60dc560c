// How a kernel is launched: on the stream of the operations issued now, with as much shared memory
// as it asks for, alone or while the one before it ends, in clusters, or on all SMs at once.
#pragma once

#include <string>
#include <unordered_map>
#include <utility>

#include "ops/cuda/core/handles.h"

namespace nanovllm {

class KernelLauncher {
 public:
  /// Whether a kernel that calls wait_for_previous() may begin while the one before it ends.
  bool can_launch_early() const { return can_launch_early_; }

 protected:
  explicit KernelLauncher(int index) : index_(index) {}
  ~KernelLauncher() = default;

  virtual cudaStream_t stream() const = 0;
  void use_device() const { cuda_check(cudaSetDevice(index_)); }
  /// Throws Error(device) where the GPU has less.
  void allow_shared_memory(const void* kernel, size_t bytes);

  /// Launches `kernel` on the stream; an empty grid launches nothing.
  template <class... Parameters, class... Arguments>
  void launch(void (*kernel)(Parameters...), dim3 grid, unsigned block, size_t shared_bytes,
              Arguments&&... arguments) {
    launch_with(kernel, grid, block, shared_bytes, false, std::forward<Arguments>(arguments)...);
  }
  /// The same for a kernel that calls wait_for_previous() (device.cuh): it may begin while the one
  /// before it ends.
  template <class... Parameters, class... Arguments>
  void launch_early(void (*kernel)(Parameters...), dim3 grid, unsigned block, size_t shared_bytes,
                    Arguments&&... arguments) {
    launch_with(kernel, grid, block, shared_bytes, can_launch_early_,
                std::forward<Arguments>(arguments)...);
  }
  template <class... Parameters, class... Arguments>
  void launch_with(void (*kernel)(Parameters...), dim3 grid, unsigned block, size_t shared_bytes,
                   bool early, Arguments&&... arguments) {
    launch_clusters(kernel, grid, 1, block, shared_bytes, early,
                    std::forward<Arguments>(arguments)...);
  }
  /// `early`: as launch_early(). Blocks are clusters of `cluster` neighbours, which divide grid.x.
  template <class... Parameters, class... Arguments>
  void launch_clusters(void (*kernel)(Parameters...), dim3 grid, unsigned cluster, unsigned block,
                       size_t shared_bytes, bool early, Arguments&&... arguments) {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
    use_device();
    const void* entry = reinterpret_cast<const void*>(kernel);
    if (shared_bytes > kDefaultSharedBytes) allow_shared_memory(entry, shared_bytes);
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(block);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream();
    cudaLaunchAttribute attributes[2]{};
    config.attrs = attributes;
    if (early) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim = {cluster, 1, 1};
    }
    if (const cudaError_t status =
            cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
        status != cudaSuccess) [[unlikely]]
      fail_launch(entry, status, grid, block, shared_bytes);
  }
  /// Launches one block on each SM, all at once; the driver may refuse.
  template <class Arguments>
  cudaError_t launch_on_all_sms(void (*kernel)(Arguments), unsigned block, size_t shared_bytes,
                                const Arguments& arguments) {
    allow_shared_memory(reinterpret_cast<const void*>(kernel), shared_bytes);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(num_sms_));
    config.blockDim = dim3(block);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream();
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return fails_cooperative_launches_ ? cudaErrorCooperativeLaunchTooLarge
                                       : cudaLaunchKernelEx(&config, kernel, arguments);
  }
  [[noreturn]] static void fail_launch(const void* kernel, cudaError_t status, dim3 grid,
                                       unsigned block, size_t shared_bytes);

  int index_;
  std::string name_;
  int num_sms_ = 0;
  size_t max_shared_bytes_ = 0;    // of one block
  bool can_launch_early_ = false;  // programmatic dependent launch: code for sm_90 or newer
  bool fails_cooperative_launches_ = false;  // for tests

 private:
  static constexpr size_t kDefaultSharedBytes = 48 * 1024;         // more needs the kernel's leave
  std::unordered_map<const void*, size_t> shared_memory_allowed_;  // bytes by kernel
};

}  // namespace nanovllm
