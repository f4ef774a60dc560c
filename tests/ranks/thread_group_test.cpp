#include "comm/thread_group.h"

#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include <gtest/gtest.h>

namespace nanovllm {
namespace {

using namespace std::chrono_literals;

/// Runs `body(rank, communicator)` on a thread per rank.
void on_ranks(const std::shared_ptr<ThreadGroup>& group,
              const std::function<void(int, Communicator&)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < group->world_size(); ++rank)
    threads.emplace_back([&, rank] {
      const auto comm = make_thread_communicator(group, rank);
      body(rank, *comm);
    });
  for (std::thread& thread : threads) thread.join();
}

template <class T>
void expect_sums_in_rank_order(int world, int64_t count) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0, 100);
  std::vector<std::vector<T>> x(static_cast<size_t>(world));
  for (auto& values : x)
    for (int64_t i = 0; i < count; ++i) values.push_back(static_cast<T>(normal(random)));
  std::vector<T> expected;
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    float sum = 0;  // 0 + x is x
    for (const auto& values : x) sum += static_cast<float>(values[i]);
    expected.push_back(static_cast<T>(sum));
  }
  on_ranks(std::make_shared<ThreadGroup>(world, 300s), [&](int rank, Communicator& comm) {
    comm.all_reduce(Tensor(x[static_cast<size_t>(rank)].data(), dtype_of<T>(), {1, count}));
  });
  for (const auto& values : x)
    EXPECT_TRUE(expected.empty() ||
                std::memcmp(values.data(), expected.data(), expected.size() * sizeof(T)) == 0);
}

TEST(ThreadGroup, SumsInF32InRankOrderAndTheSameEverywhere) {
  for (const int world : {1, 2, 3, 8})
    for (const int64_t count : {0, 1, 5, 1000}) {
      expect_sums_in_rank_order<float>(world, count);
      expect_sums_in_rank_order<bf16>(world, count);
    }
}

// Ranks hold 3 columns each of 7: the last one's third is padding, and a fourth rank has nothing.
TEST(ThreadGroup, GathersColumnsAndLeavesOutThePadding) {
  for (const int world : {3, 4}) {
    std::vector<std::vector<float>> parts(static_cast<size_t>(world)), out(parts.size());
    on_ranks(std::make_shared<ThreadGroup>(world, 300s), [&](int rank, Communicator& comm) {
      auto& own = parts[static_cast<size_t>(rank)];
      own.assign(static_cast<size_t>(world * 2 * 3), -1);
      for (int row = 0; row < 2; ++row)
        for (int column = 0; column < 3; ++column)
          own[static_cast<size_t>(rank * 6 + row * 3 + column)] =
              static_cast<float>(100 * row + 3 * rank + column);
      auto& all = out[static_cast<size_t>(rank)];
      all.assign(14, -2);
      comm.all_gather(Tensor(all.data(), DType::f32, {2, 7}),
                      Tensor(own.data(), DType::f32, {world, 2, 3}));
    });
    const std::vector<float> expected = {0, 1, 2, 3, 4, 5, 6, 100, 101, 102, 103, 104, 105, 106};
    for (const auto& all : out) EXPECT_EQ(all, expected);
  }
}

TEST(ThreadGroup, AFailureWakesAndStopsEveryRankWithItsReason) {
  const auto group = std::make_shared<ThreadGroup>(3, 60s);
  std::atomic<int> woken = 0, stopped = 0;
  group->on_failure([&] { ++woken; });
  on_ranks(group, [&](int rank, Communicator&) {
    if (rank == 1) {
      std::this_thread::sleep_for(20ms);
      group->fail({1, ErrorKind::device, "the device is gone"});
      group->fail({1, ErrorKind::device, "and more"});
      return;
    }
    for (int again = 0; again < 2; ++again) {
      try {
        group->barrier(rank);
        ADD_FAILURE();
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::device);
        EXPECT_STREQ(error.what(), "rank 1 of 3: the device is gone");
        ++stopped;
      }
    }
  });
  EXPECT_EQ(woken, 1);
  EXPECT_EQ(stopped, 4);
  group->on_failure([&] { ++woken; });
  EXPECT_EQ(woken, 2);
}

TEST(ThreadGroup, ARankThatDoesNotComeIsNamed) {
  const auto group = std::make_shared<ThreadGroup>(4, 3s);
  on_ranks(group, [&](int rank, Communicator&) {
    group->barrier(rank);
    if (rank == 2) return;
    try {
      group->barrier(rank);
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(), "rank 2 of 4: hangs: the other ranks have waited 3.0 s for it");
    }
  });
}

}  // namespace
}  // namespace nanovllm
