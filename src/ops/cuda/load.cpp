// Weights: host memory (usually a mapped file) through a ring of pinned buffers to the device,
// converted on the way by the host. While one buffer travels, the next is filled.
#include <algorithm>
#include <cstring>

#include "ops/cuda/cuda_backend.h"

namespace nanovllm {
namespace {

/// One element at any byte address: a mapped file aligns nothing.
template <class From>
From read(const std::byte* p) {
  From value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

template <class To, class From>
void convert(std::byte* to, const std::byte* from, size_t count) {
  To* out = reinterpret_cast<To*>(to);
  for (size_t i = 0; i < count; ++i)
    out[i] = static_cast<To>(static_cast<float>(read<From>(from + i * sizeof(From))));
}

/// `count` elements of dtype `source` at `from`, as dtype `target` to `to`.
void convert(std::byte* to, DType target, const std::byte* from, DType source, size_t count) {
  if (target == source) {
    std::memcpy(to, from, count * size_of(target));
    return;
  }
  dispatch_float(target, [&]<class To>() {
    switch (source) {
      case DType::f32:
        return convert<To, float>(to, from, count);
      case DType::f16:
        return convert<To, f16>(to, from, count);
      case DType::bf16:
        return convert<To, bf16>(to, from, count);
      default:
        fail(ErrorKind::engine, "load: {} to {}", name_of(source), name_of(target));
    }
  });
}

/// A host tensor as rows of dense elements: [n, k] with any row stride, or anything contiguous as
/// one row.
struct Rows {
  int64_t count, length, stride;  // stride in elements
  explicit Rows(const Tensor& t) {
    const bool matrix = t.rank == 2 && (t.stride[1] == 1 || t.shape[1] == 1) && !t.contiguous();
    check(matrix || t.contiguous(), "load: {} is neither contiguous nor a matrix with dense rows",
          t.describe());
    count = matrix ? t.shape[0] : 1;
    length = matrix ? t.shape[1] : t.numel();
    stride = matrix ? t.stride[0] : length;
  }
};

}  // namespace

size_t CudaBackend::weight_bytes(DType dtype, int64_t n, int64_t k) const {
  return static_cast<size_t>(n) * static_cast<size_t>(k) * size_of(dtype);
}

Tensor CudaBackend::weight_view(std::byte* data, DType dtype, int64_t n, int64_t k) const {
  return Tensor(data, dtype, {n, k}, device());
}

CudaBackend::Stage& CudaBackend::next_stage() {
  Stage& stage = stages_[next_stage_++ % kStages];
  if (!stage.data) {
    stage.data = allocate_host(kStageBytes);
    cudaEvent_t event = nullptr;
    cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    stage.done.reset(event);
  }
  cuda_check(cudaEventSynchronize(stage.done.get()));  // an event never recorded is done
  return stage;
}

void CudaBackend::load(Tensor dst, std::span<const Tensor> parts) {
  int64_t stacked = 0;
  for (const Tensor& part : parts) {
    bool fits = part.rank == dst.rank;
    for (size_t axis = 1; fits && axis < static_cast<size_t>(dst.rank); ++axis)
      fits = part.shape[axis] == dst.shape[axis];
    check(fits, "load: {} is no part of {}", part.describe(), dst.describe());
    stacked += part.shape[0];
  }
  check(dst.rank > 0 && dst.contiguous() && stacked == dst.shape[0], "load: {} rows into {}",
        stacked, dst.describe());
  use_device();

  const size_t size = size_of(dst.dtype), capacity = kStageBytes / size;
  std::byte* target = dst.data;
  Stage* stage = nullptr;
  size_t filled = 0;  // elements in `stage`
  const auto send = [&] {
    if (filled == 0) return;
    cuda_check(cudaMemcpyAsync(target, stage->data.get(), filled * size, cudaMemcpyHostToDevice,
                               stream_.get()));
    cuda_check(cudaEventRecord(stage->done.get(), stream_.get()));
    target += filled * size;
    filled = 0;
  };
  for (const Tensor& part : parts) {
    const Rows rows(part);
    for (int64_t row = 0; row < rows.count; ++row) {
      const std::byte* from =
          part.data + static_cast<size_t>(row * rows.stride) * size_of(part.dtype);
      for (size_t left = static_cast<size_t>(rows.length); left > 0;) {
        if (filled == 0) stage = &next_stage();
        const size_t n = std::min(left, capacity - filled);
        convert(stage->data.get() + filled * size, dst.dtype, from, part.dtype, n);
        from += n * size_of(part.dtype);
        left -= n;
        filled += n;
        if (filled == capacity) send();
      }
    }
  }
  send();
}

}  // namespace nanovllm
