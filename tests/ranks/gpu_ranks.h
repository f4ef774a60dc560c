// Shared by tests of ranks on GPUs.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "gpu/cuda_trial.h"
#include "ranks/open_ranks.h"

namespace nanovllm {

/// The GPUs of `world` ranks; empty where there are not as many.
inline std::vector<std::string> devices_for(int world) {
  std::vector<std::string> devices;
  for (int rank = 0; rank < world; ++rank) {
    devices.push_back(fmt::format("cuda:{}", rank));
    try {
      make_backend(devices.back(), {});
    } catch (const Error&) {
      return {};
    }
  }
  return devices;
}

/// `count` values of a rank's own, from -8 to 8.
template <class T>
std::vector<T> values_of(int rank, int64_t count) {
  auto random = static_cast<uint32_t>(rank + 1);
  std::vector<T> values;
  values.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    random = random * 1664525 + 1013904223;
    values.push_back(static_cast<T>(static_cast<float>(random >> 8) * 0x1p-20F - 8.0F));
  }
  return values;
}

using RankBody = std::function<void(Backend&, Communicator&, ThreadGroup&)>;

/// `limits`: of the ranks' GPUs, in order; those past its end have none.
inline void on_ranks(const std::vector<std::string>& devices, const std::vector<CudaLimits>& limits,
                     const RankBody& body) {
  const auto group =
      std::make_shared<ThreadGroup>(static_cast<int>(devices.size()), std::chrono::seconds(20));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < group->world_size(); ++rank)
    threads.emplace_back([&, rank] {
      try {
        const auto backend = make_backend(devices[static_cast<size_t>(rank)], {});
        if (static_cast<size_t>(rank) < limits.size())
          limit_cuda(*backend, limits[static_cast<size_t>(rank)]);
        const auto comm = open_communicator(*backend, group, rank);
        body(*backend, *comm, *group);
        backend->synchronize();
        group->barrier(rank);  // nobody frees what another still writes to
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
        group->fail({rank, ErrorKind::engine, error.what()});
      }
    });
  for (std::thread& thread : threads) thread.join();
}

inline void on_ranks(const std::vector<std::string>& devices, const RankBody& body) {
  on_ranks(devices, {}, body);
}

}  // namespace nanovllm
