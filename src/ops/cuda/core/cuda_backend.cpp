// The device itself: memory, copies, graphs.
#include "ops/cuda/core/cuda_backend.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <future>
#include <string_view>

#include "ops/cuda/comm/communicator.h"
#include "ops/cuda/core/code_architecture.h"
#include "ops/cuda/core/micro_batches.h"

namespace nanovllm {
namespace {

constexpr double kMegabyte = 1e6;

/// Makes a graph of several hundred kernels executable: that takes some milliseconds.
GraphExec instantiate(int device, const RawGraph& graph) {
  cuda_check(cudaSetDevice(device));
  cudaGraphExec_t instance = nullptr;
  cuda_check(cudaGraphInstantiate(&instance, graph.get(), 0));
  GraphExec exec(instance);
  const Stream stream = make_stream();
  cuda_check(cudaGraphUpload(instance, stream.get()));
  cuda_check(cudaStreamSynchronize(stream.get()));
  return exec;
}

/// A thread of its own prepares it.
class CudaGraph final : public Graph {
 public:
  CudaGraph(int device, RawGraph graph, cudaStream_t stream)
      : pending_(
            std::async(std::launch::async,
                       [device, owner = std::move(graph)] { return instantiate(device, owner); })),
        stream_(stream) {}
  bool is_ready() override {
    return !pending_.valid() ||
           pending_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }
  void wait_until_ready() override {
    if (pending_.valid()) exec_ = pending_.get();
  }
  void launch() override {
    wait_until_ready();
    cuda_check(cudaGraphLaunch(exec_.get(), stream_));
  }

 private:
  std::future<GraphExec> pending_;
  GraphExec exec_;
  cudaStream_t stream_;  // the backend's, which outlives its graphs
};

class CudaFence final : public Fence {
 public:
  CudaFence(int device, cudaStream_t stream)
      : device_(device), stream_(stream), event_(make_event()) {}
  void record() override {
    cuda_check(cudaSetDevice(device_));
    cuda_check(cudaEventRecord(event_.get(), stream_));
  }
  void wait() override { cuda_check(cudaEventSynchronize(event_.get())); }
  cudaStream_t stream() const { return stream_; }

 private:
  int device_;
  cudaStream_t stream_;  // the backend's, which outlives its fences
  Event event_;
};

/// How many GPUs there are: at least one, or the reason why not.
int device_count() {
  int count = 0, driver = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) return count;
  (void)cudaGetLastError();
  // Without a driver the runtime complains of an old one, version 0.
  if (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0)
    fail(ErrorKind::device, "no NVIDIA driver was found");
  check(status == cudaSuccess || status == cudaErrorNoDevice, ErrorKind::device,
        "the NVIDIA driver does not work: {} (driver for CUDA {}.{}, module for {}.{})",
        cudaGetErrorString(status), driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000,
        CUDART_VERSION % 1000 / 10);
  fail(ErrorKind::device, "the NVIDIA driver finds no GPU");
}

/// A function of the driver itself, which the module is not linked with.
void* driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
  cuda_check(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found));
#else
  cuda_check(cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found));
#endif
  check(found == cudaDriverEntryPointSuccess && function, ErrorKind::device,
        "the NVIDIA driver has no {}: it is too old", name);
  return function;
}

}  // namespace

cudaStream_t stream_of(const Fence& fence) {
  return dynamic_cast<const CudaFence&>(fence).stream();
}

CudaBackend::CudaBackend(int index) : KernelLauncher(index) {
  const int count = device_count();
  check(0 <= index && index < count, ErrorKind::device,
        "cuda:{} does not exist: there {} {} device{}", index, count == 1 ? "is" : "are", count,
        count == 1 ? "" : "s");
  use_device();
  cudaDeviceProp properties{};
  cuda_check(cudaGetDeviceProperties(&properties, index));
  check(properties.major >= 8, ErrorKind::device,
        "cuda:{} {} has compute capability {}.{}; 8.0 (Ampere) or newer is needed", index,
        properties.name, properties.major, properties.minor);
  const int architecture = 10 * properties.major + properties.minor;
  check(
      architecture >= NANOVLLM_CUDA_LOWEST_ARCHITECTURE, ErrorKind::device,
      "cuda:{} {} is of architecture {}, but the CUDA module was built for {} and newer; configure "
      "with -DNANOVLLM_CUDA_ARCHITECTURES={}",
      index, properties.name, architecture, NANOVLLM_CUDA_LOWEST_ARCHITECTURE, architecture);
  name_ = fmt::format("cuda:{} {}", index, properties.name);
  num_sms_ = properties.multiProcessorCount;
  max_shared_bytes_ = properties.sharedMemPerBlockOptin;
  code_architecture_ = code_architecture();
#ifdef NANOVLLM_CUDA_HOPPER
  is_hopper_ = architecture == 90;  // code for sm_90a runs nowhere else
#endif
  if (const char* wanted = std::getenv("NANOVLLM_TEST_CUDA_ARCH")) take_path_of(wanted);
  can_launch_early_ = code_architecture_ >= 90;
  if (can_launch_early_)
    encode_map_ =
        reinterpret_cast<decltype(encode_map_)>(driver_function("cuTensorMapEncodeTiled"));
  other_sms_ = is_hopper_ && num_sms_ > 2 * kOverlapProductSms ? kOverlapProductSms : 0;
  int cooperative = 0;
  cuda_check(cudaDeviceGetAttribute(&cooperative, cudaDevAttrCooperativeLaunch, index));
  can_run_cooperatively_ = cooperative != 0;

  for (MicroBatch& micro_batch : micro_batches_) open_micro_batch(micro_batch);
  ahead_ = make_stream();
  copied_ahead_ = make_event();
  cublasLtHandle_t blas = nullptr;
  cublas_check(cublasLtCreate(&blas));
  blas_.reset(blas);
  gemm_algorithms_ = std::make_unique<GemmAlgorithms>(blas, properties.name);
  if (const char* debug = std::getenv("NANOVLLM_DEBUG"))
    logs_choices_ = std::string_view(debug) == "gemm";
  exchange_ = allocate(kExchangeBytes);
  scan_scratch_ = allocate(kScanBytes);
  if (!gemm_algorithms_->families().are_known()) compare_gemm_families();
}

/// For tests and benchmarks: from now on this GPU takes the path of one of another architecture.
/// Code for sm_90 has parts that call for TMA; so a path before sm_90 needs a module without it.
void CudaBackend::take_path_of(std::string_view architecture) {
  struct Path {
    std::string_view name;
    int code;
    size_t shared_bytes;  // of one block
  };
  constexpr size_t kKiB = 1024;
  // Without the kernels for sm_90a alone 90 is what sm_100 and sm_120 take, too.
  constexpr Path kPaths[] = {
      {"80", 80, 163 * kKiB}, {"86", 86, 99 * kKiB}, {"89", 89, 99 * kKiB}, {"90", 90, 227 * kKiB}};
  const auto* path = std::ranges::find(kPaths, architecture, &Path::name);
  check(path != std::end(kPaths), ErrorKind::device,
        "NANOVLLM_TEST_CUDA_ARCH {} is none of 80, 86, 89 and 90", architecture);
  check(code_architecture_ <= path->code, ErrorKind::device,
        "NANOVLLM_TEST_CUDA_ARCH {}: the module runs code for {}; build one with "
        "-DNANOVLLM_CUDA_ARCHITECTURES=80",
        architecture, code_architecture_);
  is_hopper_ = false;
  max_shared_bytes_ = std::min(max_shared_bytes_, path->shared_bytes);
}

CudaBackend::~CudaBackend() {
  // Work that still runs reads the buffers that go now. Errors have nobody to go to.
  (void)cudaSetDevice(index_);
  for (const MicroBatch& micro_batch : micro_batches_)
    (void)cudaStreamSynchronize(micro_batch.stream.get());
}

MemoryInfo CudaBackend::memory() const {
  use_device();
  MemoryInfo info;
  cuda_check(cudaMemGetInfo(&info.free, &info.total));
  return info;
}

Buffer CudaBackend::allocate(size_t bytes) {
  if (bytes == 0) return {};
  use_device();
  void* data = nullptr;
  if (cudaMalloc(&data, bytes) != cudaSuccess) {
    (void)cudaGetLastError();
    const MemoryInfo info = memory();
    fail(ErrorKind::device, "{}: no room for {:.1f} MB: {:.1f} MB of {:.1f} MB are free", name_,
         static_cast<double>(bytes) / kMegabyte, static_cast<double>(info.free) / kMegabyte,
         static_cast<double>(info.total) / kMegabyte);
  }
  Buffer buffer(static_cast<std::byte*>(data), [device = index_](std::byte* p) {
    (void)cudaSetDevice(device);
    (void)cudaFree(p);
  });
  cuda_check(cudaMemsetAsync(data, 0, bytes, stream()));
  return buffer;
}

Buffer CudaBackend::allocate_host(size_t bytes) {
  if (bytes == 0) return {};
  use_device();
  void* data = nullptr;
  if (cudaMallocHost(&data, bytes) != cudaSuccess) {
    (void)cudaGetLastError();
    fail(ErrorKind::device, "no room for {:.1f} MB of pinned host memory",
         static_cast<double>(bytes) / kMegabyte);
  }
  return Buffer(static_cast<std::byte*>(data), [](std::byte* p) { (void)cudaFreeHost(p); });
}

void CudaBackend::synchronize() {
  use_device();
  cuda_check(cudaStreamSynchronize(stream()));
}

std::unique_ptr<Fence> CudaBackend::make_fence() {
  use_device();
  return std::make_unique<CudaFence>(index_, stream());
}

std::unique_ptr<Graph> CudaBackend::capture(const std::function<void()>& body) {
  use_device();
  cuda_check(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal));
  std::exception_ptr failure;
  try {
    body();
  } catch (...) {
    failure = std::current_exception();
  }
  cudaGraph_t graph = nullptr;
  const cudaError_t ended =
      cudaStreamEndCapture(stream(), &graph);  // on every path: the stream must leave capture
  RawGraph owner(graph);
  if (failure) {
    (void)cudaGetLastError();
    std::rethrow_exception(failure);
  }
  cuda_check(ended);
  return std::make_unique<CudaGraph>(index_, std::move(owner), stream());
}

int CudaBackend::resident_blocks(const void* kernel, int threads) const {
  use_device();
  int of_sm = 0;
  cuda_check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_sm, kernel, threads, 0));
  return of_sm * num_sms_;
}

void CudaBackend::limit(const CudaLimits& limits) {
  if (limits.num_sms > 0) num_sms_ = std::min(num_sms_, limits.num_sms);
  fails_cooperative_launches_ = limits.fails_cooperative_launches;
  can_run_cooperatively_ = can_run_cooperatively_ && !limits.lacks_cooperative_launches;
  last_epoch_ = limits.last_epoch;
  has_uneven_weights_ = limits.has_uneven_weights;
}

}  // namespace nanovllm
