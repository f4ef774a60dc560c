#include <algorithm>

#include "ops/cuda/copied_sums.h"
#include "ops/cuda/peer_exchange.cuh"

namespace nanovllm {
namespace {

constexpr size_t kScratchBytes = size_t{48} << 20;  // of each half
constexpr int64_t kVector = 16;                     // bytes
constexpr int kThreads = 512;

}  // namespace

CopiedSums::CopiedSums(CudaBackend& backend, RankMeeting& meeting, int rank, cudaStream_t stream)
    : meeting_(meeting),
      device_(backend.device().index),
      rank_(rank),
      world_(meeting.world_size()),
      stream_(stream),
      ready_(make_event()),
      scratch_(backend.allocate(2 * kScratchBytes)) {
  int lowest = 0, highest = 0;
  cuda_check(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  cudaStream_t copies = nullptr;
  cuda_check(cudaStreamCreateWithPriority(&copies, cudaStreamNonBlocking, highest));
  copies_.reset(copies);
  for (size_t i = 0; i < own_.halves.size(); ++i)
    own_.halves[i] = {make_event(), make_event(), scratch_.get() + i * kScratchBytes};
  meeting_.show(rank_, &own_);
  meeting_.barrier(rank_);
  for (int r = 0; r < world_; ++r)
    ranks_.push_back(static_cast<const Shown*>(meeting_.shown_by(r)));
  meeting_.barrier(rank_);
}

CopiedSums::~CopiedSums() {
  (void)cudaSetDevice(device_);
  (void)cudaStreamSynchronize(copies_.get());
}

void CopiedSums::start(int half, Tensor x) {
  cuda_check(cudaSetDevice(device_));
  cuda_check(cudaEventRecord(ready_.get(), stream_));
  cuda_check(cudaStreamWaitEvent(copies_.get(), ready_.get(), 0));
  const int64_t vectors = static_cast<int64_t>(x.bytes()) / kVector,
                room = static_cast<int64_t>(kScratchBytes) / kVector / std::max(1, world_ - 1),
                most = (room - 1) * world_;
  for (int64_t begin = 0; begin < vectors; begin += most) {
    if (begin > 0) wait_for(copies_.get(), &Half::done, half);  // the scratch memory is free again
    exchange(half, x.data + begin * kVector, std::min(most, vectors - begin), x.dtype);
  }
}

void CopiedSums::exchange(int half, std::byte* x, int64_t vectors, DType dtype) {
  const auto h = static_cast<size_t>(half);
  const int64_t distance = vectors / world_ + 1;
  own_.x = x;
  meeting_.barrier(rank_);
  const auto to_others = [&](auto&& send) {  // not all to the same one at the same time
    for (int i = 1; i < world_; ++i) send((rank_ + i) % world_);
  };
  to_others([&](int r) {
    const int64_t begin = share(vectors, r);
    copy(ranks_[static_cast<size_t>(r)]->halves[h].scratch +
             (rank_ - (rank_ > r)) * distance * kVector,
         x + begin * kVector, share(vectors, r + 1) - begin);
  });
  cuda_check(cudaEventRecord(own_.halves[h].sent.get(), copies_.get()));
  meeting_.barrier(rank_);
  wait_for(copies_.get(), &Half::sent, half);
  const int64_t begin = share(vectors, rank_), count = share(vectors, rank_ + 1) - begin;
  if (count > 0)
    dispatch_float(dtype, [&]<class T>() {
      using D = DeviceType<T>;
      constexpr int64_t kMostBlocks = 528;
      sum_parts_kernel<D, kThreads, false>
          <<<static_cast<unsigned>(std::min(kMostBlocks, ceil_div(count, int64_t{kThreads}))),
             kThreads, 0, copies_.get()>>>(reinterpret_cast<Vec<D>*>(x + begin * kVector),
                                           reinterpret_cast<const uint4*>(own_.halves[h].scratch),
                                           count, distance, rank_, world_);
      cuda_check(cudaGetLastError());
    });
  to_others([&](int r) {
    copy(ranks_[static_cast<size_t>(r)]->x + begin * kVector, x + begin * kVector, count);
  });
  cuda_check(cudaEventRecord(own_.halves[h].done.get(), copies_.get()));
  meeting_.barrier(rank_);
}

void CopiedSums::copy(std::byte* to, const std::byte* from, int64_t vectors) {
  if (vectors == 0) return;
  cuda_check(cudaMemcpyAsync(to, from, static_cast<size_t>(vectors * kVector),
                             cudaMemcpyDeviceToDevice, copies_.get()));
}

void CopiedSums::wait_for(cudaStream_t stream, Event Half::*event, int half) const {
  for (const Shown* rank : ranks_)
    cuda_check(
        cudaStreamWaitEvent(stream, (rank->halves[static_cast<size_t>(half)].*event).get(), 0));
}

void CopiedSums::finish(int half) {
  cuda_check(cudaSetDevice(device_));
  wait_for(stream_, &Half::done, half);
}

}  // namespace nanovllm
