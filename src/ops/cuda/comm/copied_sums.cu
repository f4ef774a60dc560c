#include <algorithm>

#include "ops/cuda/comm/copied_sums.h"
#include "ops/cuda/comm/peer_exchange.cuh"
#include "ops/cuda/rowwise/row_math.cuh"

namespace nanovllm {
namespace {

constexpr size_t kScratchBytes = size_t{48} << 20;  // of each half

/// The result of all_reduce, then add_rms_norm (norm.cu), bit for bit, where the other ranks' parts
/// are here: those of a rank begin `distance` vectors behind those of the one before. A row is a
/// block's, whose threads are those of add_rms_norm, kHeld vectors each at most.
template <class T, int kHeld>
__global__ void __launch_bounds__(512)
    sum_norm_kernel(T* x, T* residual, const T* w, const uint4* parts, int64_t rows, int64_t n,
                    int64_t distance, float eps, int rank, int world) {
  __shared__ float shared[kWarp];
  const int64_t vectors = n / Vec<T>::size;
  const auto held = [&](auto&& use) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j)
      if (const int64_t i = threadIdx.x + int64_t{j} * blockDim.x; i < vectors) use(j, i);
  };
  Vec<T> weights[kHeld], values[kHeld];
  held([&](int j, int64_t i) { weights[j] = reinterpret_cast<const Vec<T>*>(w)[i]; });
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    auto* own = reinterpret_cast<Vec<T>*>(x + row * n);
    auto* stream = reinterpret_cast<Vec<T>*>(residual + row * n);
    float squares = 0.0f;
    held([&](int j, int64_t i) {
      const Vec<T> before = stream[i];
      values[j] = sum_over_ranks<T>(rank, world, own[i], [&](int r) {
        return parts[(r - (r > rank)) * distance + row * vectors + i];
      });
      add_stream(values[j], before);
      stream[i] = values[j];
      squares = add_squares(squares, values[j]);
    });
    const float reciprocal = reciprocal_rms(block_sum(squares, shared), n, eps);
    held([&](int j, int64_t i) {
      normalise(values[j], reciprocal, weights[j]);
      own[i] = values[j];
    });
    __syncthreads();  // before the next row's sum
  }
}

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

void CopiedSums::start(int half, Tensor x, Tensor residual, Tensor w, float eps, bool whole) {
  cuda_check(cudaSetDevice(device_));
  cuda_check(cudaEventRecord(ready_.get(), stream_));
  cuda_check(cudaStreamWaitEvent(copies_.get(), ready_.get(), 0));
  const auto row_bytes = static_cast<int64_t>(x[0].bytes());
  const int64_t rows = x.shape[0],
                room = static_cast<int64_t>(kScratchBytes) / row_bytes / std::max(1, world_ - 1),
                most = room * world_;
  for (int64_t begin = 0; begin < rows; begin += most) {
    if (begin > 0) wait_for(copies_.get(), &Half::done, half);  // the scratch memory is free again
    const int64_t end = std::min(rows, begin + most);
    exchange(half, {x.rows(begin, end), residual.rows(begin, end), w, eps, whole});
  }
}

void CopiedSums::exchange(int half, const Rows& rows) {
  const auto h = static_cast<size_t>(half);
  const int64_t count = rows.x.shape[0], distance = ceil_div(count, int64_t{world_});
  const size_t row_bytes = rows.x[0].bytes();
  const auto bytes = [&](int64_t r) { return static_cast<size_t>(r) * row_bytes; };
  own_.x = rows.x.data;
  own_.residual = rows.residual.data;
  meeting_.barrier(rank_);
  const auto to_others = [&](auto&& send) {  // not all to the same one at the same time
    for (int i = 1; i < world_; ++i) send((rank_ + i) % world_);
  };
  to_others([&](int r) {
    const int64_t begin = share(count, r);
    copy(
        ranks_[static_cast<size_t>(r)]->halves[h].scratch + bytes((rank_ - (rank_ > r)) * distance),
        rows.x.data + bytes(begin), bytes(share(count, r + 1) - begin));
  });
  cuda_check(cudaEventRecord(own_.halves[h].sent.get(), copies_.get()));
  meeting_.barrier(rank_);
  wait_for(copies_.get(), &Half::sent, half);
  const int64_t begin = share(count, rank_), end = share(count, rank_ + 1);
  const size_t at = bytes(begin), size = bytes(end - begin);
  if (begin < end)
    sum_and_norm({rows.x.rows(begin, end), rows.residual.rows(begin, end), rows.w, rows.eps, {}},
                 own_.halves[h].scratch, distance);
  to_others([&](int r) {
    const Shown& theirs = *ranks_[static_cast<size_t>(r)];
    copy(theirs.x + at, rows.x.data + at, size);
    if (rows.whole) copy(theirs.residual + at, rows.residual.data + at, size);
  });
  cuda_check(cudaEventRecord(own_.halves[h].done.get(), copies_.get()));
  meeting_.barrier(rank_);
}

void CopiedSums::sum_and_norm(const Rows& share, const std::byte* parts, int64_t distance) {
  const int64_t rows = share.x.shape[0], n = share.x.shape[1];
  const unsigned threads = row_threads(n);
  dispatch_float(share.x.dtype, [&]<class T>() {
    using D = DeviceType<T>;
    constexpr int64_t kMostBlocks = 528;
    const int64_t vectors = n / Vec<D>::size;
    const auto kernel = vectors <= int64_t{threads} ? sum_norm_kernel<D, 1> : sum_norm_kernel<D, 2>;
    kernel<<<static_cast<unsigned>(std::min(kMostBlocks, rows)), threads, 0, copies_.get()>>>(
        device_ptr<T>(share.x), device_ptr<T>(share.residual), device_ptr<T>(share.w),
        reinterpret_cast<const uint4*>(parts), rows, n, distance * vectors, share.eps, rank_,
        world_);
    cuda_check(cudaGetLastError());
  });
}

void CopiedSums::copy(std::byte* to, const std::byte* from, size_t bytes) {
  if (bytes == 0) return;
  cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, copies_.get()));
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
