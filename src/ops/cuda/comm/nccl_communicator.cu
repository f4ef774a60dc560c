// The GPUs' Communicator over NCCL, for ranks that do not reach each other's memory: on other
// hosts, in other processes, or without peer access.
//
// NCCL only moves bytes. Its own sums are not used: their order depends on where in a message an
// element lies, and they round at every step. Here every rank gets the parts of its share of the
// elements from all others, adds them up in the order of the ranks, and gives the sum to all: the
// bits are those of communicator.cu.
//
// The library is looked for at run time. NVLink multicast stays off.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <thread>

#include <nccl.h>

#include "ops/cuda/comm/communicator.h"
#include "ops/cuda/comm/nccl_library.h"
#include "ops/cuda/comm/peer_exchange.cuh"

namespace nanovllm {
namespace {

/// The functions of libnccl.so.2.
struct Nccl {
  decltype(&ncclGetUniqueId) get_unique_id;
  decltype(&ncclCommInitRank) init_rank;
  decltype(&ncclCommDestroy) destroy;
  decltype(&ncclCommAbort) abort;
  decltype(&ncclAllGather) all_gather;
  decltype(&ncclSend) send;
  decltype(&ncclRecv) recv;
  decltype(&ncclGroupStart) group_start;
  decltype(&ncclGroupEnd) group_end;
  decltype(&ncclGetErrorString) error_string;

  void check_status(ncclResult_t status) const {
    check(status == ncclSuccess, "NCCL: {}", error_string(status));
  }
};

Nccl load_nccl() {
  const NcclLibrary library;
  Nccl nccl{};
  library.find(nccl.get_unique_id, "ncclGetUniqueId");
  library.find(nccl.init_rank, "ncclCommInitRank");
  library.find(nccl.destroy, "ncclCommDestroy");
  library.find(nccl.abort, "ncclCommAbort");
  library.find(nccl.all_gather, "ncclAllGather");
  library.find(nccl.send, "ncclSend");
  library.find(nccl.recv, "ncclRecv");
  library.find(nccl.group_start, "ncclGroupStart");
  library.find(nccl.group_end, "ncclGroupEnd");
  library.find(nccl.error_string, "ncclGetErrorString");
  return nccl;
}

constexpr int kThreads = 256;
constexpr size_t kScratchBytes = size_t{64} << 20;
constexpr int64_t kOneShotBytes = 64 << 10;  // above, ranks share the sums

/// out [t, m] from the ranks' parts [world, t, n].
__global__ void __launch_bounds__(kThreads)
    side_by_side_kernel(float* out, const float* parts, int64_t t, int64_t n, int64_t m) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < t * m;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t row = i / m, column = i % m;
    out[i] = parts[(column / n * t + row) * n + column % n];
  }
}

unsigned blocks_for(int64_t count) {
  constexpr int64_t kMost = 1024;
  return static_cast<unsigned>(std::clamp<int64_t>(ceil_div(count, int64_t{kThreads}), 1, kMost));
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(CudaBackend& backend, const NcclId& id, int rank, int world_size,
                   RankMeeting* meeting)
      : nccl_(load_nccl()),
        backend_(backend),
        meeting_(meeting),
        stream_(stream_of(*backend.make_fence())),
        rank_(rank),
        world_(world_size),
        scratch_(backend.allocate(kScratchBytes)) {
    ncclUniqueId unique{};
    static_assert(sizeof(unique) == sizeof(id));
    std::memcpy(&unique, id.data(), sizeof unique);
    cuda_check(cudaSetDevice(backend.device().index));
    nccl_.check_status(nccl_.init_rank(&shared_->comm, world_, unique, rank_));
    if (meeting)
      meeting->on_failure([shared = shared_, abort = nccl_.abort] { begin_abort(shared, abort); });
  }
  ~NcclCommunicator() override {
    (void)cudaSetDevice(backend_.device().index);
    shared_->end(nccl_.destroy);
  }

  int rank() const override { return rank_; }
  int world_size() const override { return world_; }

  void all_reduce(Tensor x) override {
    const auto bytes = static_cast<int64_t>(x.bytes());
    check(x.contiguous() && bytes % 16 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0,
          "all_reduce of {}: contiguous and of whole 16 bytes", x.describe());
    cuda_check(cudaSetDevice(backend_.device().index));
    const bool shares = bytes > kOneShotBytes && world_ > 1;
    const int64_t unit = int64_t{16} * world_,
                  most = static_cast<int64_t>(kScratchBytes) / (shares ? 1 : world_) / unit * unit;
    for (int64_t begin = 0; begin < bytes;) {
      const int64_t left = std::min(most, bytes - begin);
      // The rest that does not divide equally goes to all ranks.
      const bool divided = shares && left >= unit;
      const int64_t size = divided ? left / unit * unit : left;
      dispatch_float(x.dtype, [&]<class T>() { reduce<T>(x.data + begin, size, divided); });
      begin += size;
    }
  }

  void abort() override { begin_abort(shared_, nccl_.abort); }
  void settle() override {
    if (!meeting_) return;  // other processes' drivers have nothing to do with this one's
    backend_.synchronize();
    meeting_->barrier(rank_);
  }

  void all_gather(Tensor out, Tensor parts) override {
    const int64_t t = parts.shape[1], n = parts.shape[2], m = out.shape[1];
    check(out.dtype == DType::f32 && parts.dtype == DType::f32 && out.contiguous() &&
              parts.contiguous() && out.shape[0] == t,
          "all_gather of {} to {}", parts.describe(), out.describe());
    if (t * n == 0) return;
    cuda_check(cudaSetDevice(backend_.device().index));
    gather(parts[rank_].data, parts.data, t * n * int64_t{sizeof(float)});
    side_by_side_kernel<<<blocks_for(t * m), kThreads, 0, stream_>>>(out.ptr<float>(),
                                                                     parts.ptr<float>(), t, n, m);
    cuda_check(cudaGetLastError());
  }

 private:
  /// Ends once, by whoever comes first: the rank itself or the group's failure.
  struct Shared {
    std::mutex mutex;
    ncclComm_t comm = nullptr;
    void end(ncclResult_t (*how)(ncclComm_t)) {
      const std::lock_guard lock(mutex);
      if (comm) (void)how(comm);
      comm = nullptr;
    }
  };

  /// Kernels end at once, but NCCL's abort returns only when the graphs that hold them are gone:
  /// whoever destroys those must not wait for it.
  static void begin_abort(const std::shared_ptr<Shared>& shared,
                          ncclResult_t (*abort)(ncclComm_t)) {
    std::thread([shared, abort] { shared->end(abort); }).detach();
  }

  void gather(const std::byte* own, std::byte* all, int64_t bytes) {
    nccl_.check_status(
        nccl_.all_gather(own, all, static_cast<size_t>(bytes), ncclChar, shared_->comm, stream_));
  }

  template <class T>
  void reduce(std::byte* x, int64_t bytes, bool divided) {
    using D = DeviceType<T>;
    const int64_t share = divided ? bytes / world_ : bytes;
    std::byte* own = divided ? x + rank_ * share : x;
    if (divided) {
      nccl_.check_status(nccl_.group_start());
      for (int r = 0; r < world_; ++r) {
        if (r == rank_) continue;
        const auto size = static_cast<size_t>(share);
        nccl_.check_status(nccl_.send(x + r * share, size, ncclChar, r, shared_->comm, stream_));
        nccl_.check_status(
            nccl_.recv(scratch_.get() + r * share, size, ncclChar, r, shared_->comm, stream_));
      }
      nccl_.check_status(nccl_.group_end());
    } else {
      gather(x, scratch_.get(), bytes);
    }
    sum_parts_kernel<D, kThreads><<<blocks_for(share / 16), kThreads, 0, stream_>>>(
        reinterpret_cast<Vec<D>*>(own), reinterpret_cast<const uint4*>(scratch_.get()), share / 16,
        share / 16, rank_, world_);
    cuda_check(cudaGetLastError());
    if (divided) gather(own, x, share);
  }

  const Nccl nccl_;
  CudaBackend& backend_;
  RankMeeting* meeting_;
  const cudaStream_t stream_;
  const int rank_, world_;
  Buffer scratch_;
  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

}  // namespace

NcclId new_nccl_id() {
  const Nccl nccl = load_nccl();
  ncclUniqueId unique{};
  nccl.check_status(nccl.get_unique_id(&unique));
  NcclId id{};
  std::memcpy(id.data(), &unique, sizeof unique);
  return id;
}

std::unique_ptr<Communicator> make_nccl_communicator(CudaBackend& backend, const NcclId& id,
                                                     int rank, int world_size,
                                                     RankMeeting* meeting) {
  return std::make_unique<NcclCommunicator>(backend, id, rank, world_size, meeting);
}

}  // namespace nanovllm
