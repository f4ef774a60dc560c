// The architecture of the code that runs, which need not be the GPU's.
#pragma once

namespace nanovllm {

/// The architecture (80, 90, ...) for which the code was compiled that runs on this thread's GPU:
/// an older one than the GPU's where the module has no code for it and the driver translates PTX.
///
/// Kernels ask for __CUDA_ARCH__ when they are compiled: what newer architectures have is not in
/// older code, on whichever GPU it runs. So what decides how a kernel is launched asks here, never
/// the GPU.
int code_architecture();

}  // namespace nanovllm
