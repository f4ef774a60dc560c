// The GPUs' Communicator: collectives over peer memory (peer_exchange.cuh), on the backend's
// stream.
//
// all_reduce. One-shot: everybody pushes all to everybody, and each sums for itself. Two-shot, for
// large messages between more than two: rank r gets and sums the r-th part of every chunk, and
// pushes the sum. Both add in the same order and round once: they give the same bits.
#include <algorithm>
#include <memory>
#include <vector>

#include "ops/cuda/communicator.h"
#include "ops/cuda/peer_exchange.cuh"

namespace nanovllm {
namespace {

constexpr int64_t kOneShotBytes = 256 << 10;  // above, ranks beyond two share the sums

template <class T>
__global__ void __launch_bounds__(kExchangeThreads)
    all_reduce_one_shot_kernel(Vec<T>* x, int64_t count, int64_t chunk,
                               const __grid_constant__ PeerTable table) {
  Exchange exchange(table);
  for (int64_t begin = blockIdx.x * chunk; begin < count; begin += gridDim.x * chunk) {
    const int64_t size = min(chunk, count - begin);
    exchange.begin_round();
    for (int64_t i = threadIdx.x; i < size; i += blockDim.x) {
      const uint4 bits = reinterpret_cast<const uint4&>(x[begin + i]);
      for (int r = 0; r < table.world; ++r)
        if (r != table.rank) exchange.place(r, table.rank)[i] = bits;
    }
    exchange.meet();
    for (int64_t i = threadIdx.x; i < size; i += blockDim.x)
      x[begin + i] = sum_of_ranks<T>(exchange, table, x[begin + i], i);
  }
  exchange.end();
}

template <class T>
__global__ void __launch_bounds__(kExchangeThreads)
    all_reduce_two_shot_kernel(Vec<T>* x, int64_t count, int64_t chunk,
                               const __grid_constant__ PeerTable table) {
  Exchange exchange(table);
  for (int64_t begin = blockIdx.x * chunk; begin < count; begin += gridDim.x * chunk) {
    const int64_t size = min(chunk, count - begin);
    const auto part = [&](int r) { return begin + size * r / table.world; };
    exchange.begin_round();
    for (int r = 0; r < table.world; ++r)
      for (int64_t i = part(r) + threadIdx.x; r != table.rank && i < part(r + 1); i += blockDim.x)
        exchange.place(r, table.rank)[i - part(r)] = reinterpret_cast<const uint4&>(x[i]);
    exchange.meet();
    const Exchange parts = exchange;
    exchange.begin_round();
    const int64_t own = part(table.rank), own_size = part(table.rank + 1) - own;
    for (int64_t i = threadIdx.x; i < own_size; i += blockDim.x) {
      const Vec<T> sum = sum_of_ranks<T>(parts, table, x[own + i], i);
      x[own + i] = sum;
      for (int r = 0; r < table.world; ++r)
        if (r != table.rank) exchange.place(r, table.rank)[i] = reinterpret_cast<const uint4&>(sum);
    }
    exchange.meet();
    for (int r = 0; r < table.world; ++r)
      for (int64_t i = part(r) + threadIdx.x; r != table.rank && i < part(r + 1); i += blockDim.x) {
        const uint4 bits = __ldcg(exchange.place(table.rank, r) + (i - part(r)));
        x[i] = reinterpret_cast<const Vec<T>&>(bits);
      }
  }
  exchange.end();
}

/// out [t, m] from every rank's part [t, n]; `count` is t * n.
__global__ void __launch_bounds__(kExchangeThreads)
    all_gather_kernel(float* out, const float* part, int64_t count, int64_t n, int64_t m,
                      int64_t chunk, const __grid_constant__ PeerTable table) {
  Exchange exchange(table);
  for (int64_t begin = blockIdx.x * chunk; begin < count; begin += gridDim.x * chunk) {
    const int64_t size = min(chunk, count - begin);
    exchange.begin_round();
    for (int64_t i = threadIdx.x; i < size; i += blockDim.x)
      for (int r = 0; r < table.world; ++r)
        if (r != table.rank)
          reinterpret_cast<float*>(exchange.place(r, table.rank))[i] = part[begin + i];
    exchange.meet();
    for (int r = 0; r < table.world; ++r) {
      const auto* from = reinterpret_cast<const float*>(exchange.place(table.rank, r));
      for (int64_t i = threadIdx.x; i < size; i += blockDim.x) {
        const int64_t row = (begin + i) / n, column = r * n + (begin + i) % n;
        if (column < m)
          out[row * m + column] = r == table.rank ? part[begin + i] : __ldcg(from + i);
      }
    }
  }
  exchange.end();
}

class PeerCommunicator final : public Communicator {
 public:
  PeerCommunicator(CudaBackend& backend, RankMeeting& meeting, int rank);

  int rank() const override { return table_.rank; }
  int world_size() const override { return table_.world; }
  void all_reduce(Tensor x) override;
  void all_gather(Tensor out, Tensor parts) override;

 private:
  void reach_peers(RankMeeting& meeting);
  void exchange_addresses(RankMeeting& meeting);
  /// Blocks for `bytes`, at least 4 KB each, and what each of them takes at a time, in units of
  /// `unit` bytes.
  std::pair<unsigned, int64_t> cut(int64_t bytes, int64_t unit) const;

  CudaBackend& backend_;
  const cudaStream_t stream_;
  PeerTable table_;
  Buffer inbox_, flags_, rounds_;
  std::shared_ptr<int> stop_;  // pinned
};

PeerCommunicator::PeerCommunicator(CudaBackend& backend, RankMeeting& meeting, int rank)
    : backend_(backend), stream_(stream_of(*backend.make_fence())) {
  table_.rank = rank;
  table_.world = meeting.world_size();
  check(table_.world <= kMaxPeers, ErrorKind::invalid_argument,
        "tensor_parallel_size {}: at most {} GPUs can work together", table_.world, kMaxPeers);
  reach_peers(meeting);
  inbox_ = backend.allocate(PeerTable::inbox_bytes(table_.world));
  flags_ = backend.allocate(static_cast<size_t>(table_.world) * kExchangeBlocks * sizeof(unsigned));
  rounds_ = backend.allocate(kExchangeBlocks * sizeof(unsigned));
  backend.synchronize();  // they are zeros before anybody writes
  int* stop = nullptr;
  cuda_check(cudaMallocHost(&stop, sizeof(int)));
  *stop = 0;
  stop_ = std::shared_ptr<int>(stop, [](int* p) { (void)cudaFreeHost(p); });
  meeting.on_failure([stop = stop_] { *static_cast<volatile int*>(stop.get()) = 1; });
  table_.rounds = reinterpret_cast<unsigned*>(rounds_.get());
  table_.stop = stop_.get();
  exchange_addresses(meeting);
}

/// Opens every other rank's GPU to this one.
void PeerCommunicator::reach_peers(RankMeeting& meeting) {
  int own = backend_.device().index;
  meeting.show(table_.rank, &own);
  meeting.barrier(table_.rank);
  std::vector<int> devices;
  for (int r = 0; r < table_.world; ++r) devices.push_back(*static_cast<int*>(meeting.shown_by(r)));
  meeting.barrier(table_.rank);
  cuda_check(cudaSetDevice(own));
  for (int r = 0; r < table_.world; ++r) {
    if (devices[static_cast<size_t>(r)] == own) continue;  // itself, or a rank beside it
    int can = 0;
    cuda_check(cudaDeviceCanAccessPeer(&can, own, devices[static_cast<size_t>(r)]));
    check(can != 0, ErrorKind::device,
          "cuda:{} cannot reach the memory of cuda:{}: tensor parallelism needs GPUs with peer "
          "access (NVLink, or PCIe with peer-to-peer enabled)",
          own, devices[static_cast<size_t>(r)]);
    const cudaError_t status = cudaDeviceEnablePeerAccess(devices[static_cast<size_t>(r)], 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled)
      (void)cudaGetLastError();  // by another engine of this process
    else
      cuda_check(status);
  }
}

void PeerCommunicator::exchange_addresses(RankMeeting& meeting) {
  std::byte* own[] = {inbox_.get(), flags_.get()};
  meeting.show(table_.rank, own);
  meeting.barrier(table_.rank);
  for (int r = 0; r < table_.world; ++r) {
    const auto* theirs = static_cast<std::byte* const*>(meeting.shown_by(r));
    table_.inbox[r] = theirs[0];
    table_.flags[r] = reinterpret_cast<unsigned*>(theirs[1]);
  }
  meeting.barrier(table_.rank);
}

std::pair<unsigned, int64_t> PeerCommunicator::cut(int64_t bytes, int64_t unit) const {
  constexpr int64_t kLeast = 4 << 10;
  const int64_t blocks = std::clamp<int64_t>((bytes + kLeast - 1) / kLeast, 1, kExchangeBlocks);
  const int64_t share = (bytes + blocks * unit - 1) / (blocks * unit);
  return {static_cast<unsigned>(blocks), std::clamp<int64_t>(share, 1, kPlaceBytes / unit)};
}

void PeerCommunicator::all_reduce(Tensor x) {
  const auto bytes = static_cast<int64_t>(x.bytes());
  check(x.contiguous() && bytes % 16 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0,
        "all_reduce of {}: contiguous and of whole 16 bytes", x.describe());
  if (bytes == 0) return;
  const auto [blocks, chunk] = cut(bytes, 16);
  const bool two_shot = table_.world > 2 && bytes > kOneShotBytes;
  cuda_check(cudaSetDevice(backend_.device().index));
  dispatch_float(x.dtype, [&, blocks = blocks, chunk = chunk]<class T>() {
    using D = DeviceType<T>;
    const auto kernel = two_shot ? all_reduce_two_shot_kernel<D> : all_reduce_one_shot_kernel<D>;
    kernel<<<blocks, kExchangeThreads, 0, stream_>>>(reinterpret_cast<Vec<D>*>(x.data), bytes / 16,
                                                     chunk, table_);
  });
  cuda_check(cudaGetLastError());
}

void PeerCommunicator::all_gather(Tensor out, Tensor parts) {
  const Tensor own = parts[table_.rank];
  const int64_t t = own.shape[0], n = own.shape[1], m = out.shape[1];
  check(out.dtype == DType::f32 && parts.dtype == DType::f32 && out.contiguous() &&
            parts.contiguous() && out.shape[0] == t,
        "all_gather of {} to {}", parts.describe(), out.describe());
  if (t * n == 0) return;
  const auto [blocks, chunk] = cut(t * n * int64_t{sizeof(float)}, sizeof(float));
  cuda_check(cudaSetDevice(backend_.device().index));
  all_gather_kernel<<<blocks, kExchangeThreads, 0, stream_>>>(out.ptr<float>(), own.ptr<float>(),
                                                              t * n, n, m, chunk, table_);
  cuda_check(cudaGetLastError());
}

}  // namespace

std::unique_ptr<Communicator> make_peer_communicator(CudaBackend& backend, RankMeeting& meeting,
                                                     int rank) {
  return std::make_unique<PeerCommunicator>(backend, meeting, rank);
}

}  // namespace nanovllm
