// Times operations by replaying graphs of them.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <numeric>

#include "core/seconds.h"
#include "gpu/rig.h"

namespace nanovllm {

/// The GPU, or null where there is none, which is then said.
inline std::unique_ptr<Backend> open_gpu_or_say() {
  std::string why;
  auto gpu = open_gpu(why);
  if (!gpu) std::printf("skipped: %s\n", why.c_str());
  return gpu;
}

/// A layer's cache. One block's worth of values in every block: the values do not matter, the
/// addresses do.
inline KvCache filled_cache(Rig& rig, int64_t kv_heads, int64_t head_dim, int64_t blocks,
                            int64_t block_size, DType dtype = DType::bf16) {
  const Tensor some = rig.upload(normal_values(block_size * kv_heads * head_dim, 1), DType::bf16,
                                 {block_size, kv_heads, head_dim});
  std::vector<int32_t> slots(static_cast<size_t>(block_size));
  std::iota(slots.begin(), slots.end(), 0);
  const Device device = rig.backend.device();
  const auto pages = [&] {
    Tensor t = kv_pages(nullptr, dtype, {blocks, kv_heads, block_size, head_dim}, device);
    t.data = rig.empty(dtype, {blocks, t.stride[0]}).data;
    return t;
  };
  const Tensor k = pages();
  const KvCache cache{k, pages()};
  rig.backend.store_kv(cache, some, some, rig.upload(slots, {block_size}));
  for (const Tensor& t : {cache.k, cache.v}) {
    const Tensor rows(t.data, dtype, {blocks, t.stride[0]}, device);
    for (int64_t b = 1; b < blocks; ++b) rig.backend.copy(rows[b], rows[0]);
  }
  return cache;
}

/// Microseconds of one call of `body(i)`, from a graph of `count` of them.
template <class Body>
double microseconds(Backend& gpu, int count, Body&& body) {
  body(0);  // chooses algorithms outside the recording
  gpu.synchronize();
  const auto graph = gpu.capture([&] {
    for (int i = 0; i < count; ++i) body(i);
  });
  std::vector<double> times;
  for (int run = 0; run < 8; ++run) {
    const auto begin = std::chrono::steady_clock::now();
    graph->launch();
    gpu.synchronize();
    times.push_back(1e6 * seconds_since(begin) / count);
  }
  std::sort(times.begin() + 1, times.end());  // the first run warms up
  return times[4];
}

/// Prints the times of sampling and log probabilities.
void time_sampling(Backend& gpu);
/// Prints those of products of quantised rows.
void time_fp8(Backend& gpu);
/// Prints the times of what lies between the GEMMs and attention of a decode step.
void time_small_operations(Backend& gpu);

}  // namespace nanovllm
