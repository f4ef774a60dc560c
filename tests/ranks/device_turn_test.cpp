// Groups of ranks that share devices take turns.
#include "ranks/device_turn.h"

#include <atomic>
#include <thread>

#include <gtest/gtest.h>

namespace nanovllm {
namespace {

/// A group that has something under way from take() on until it is drained.
struct FakeGroup {
  explicit FakeGroup(std::vector<std::string> devices) {
    const auto all = turn.take_all();
    turn.join(std::move(devices));
  }
  void launch() {
    const auto held = turn.take();
    busy = true;
  }

  std::atomic<int> drained = 0;
  std::atomic<bool> busy = false;
  DeviceTurn turn{[this] {
    ++drained;
    busy = false;
  }};
};

TEST(DeviceTurn, NobodyIsDrainedForItself) {
  FakeGroup one({"cuda:0", "cuda:1"});
  for (int i = 0; i < 3; ++i) one.launch();
  EXPECT_EQ(one.drained, 0);
}

TEST(DeviceTurn, WhoSharesADeviceIsDrainedOnceItHasLaunched) {
  FakeGroup one({"cuda:0", "cuda:1"}), two({"cuda:1", "cuda:2"}), apart({"cuda:3"});
  apart.launch();
  one.launch();
  two.launch();
  EXPECT_EQ(one.drained, 1);
  two.launch();
  EXPECT_EQ(one.drained, 1);  // it has nothing under way any more
  one.launch();
  EXPECT_EQ(one.drained, 1);
  EXPECT_EQ(two.drained, 1);
  EXPECT_EQ(apart.drained, 0);
}

TEST(DeviceTurn, WhoOpensDevicesWaitsForAll) {
  FakeGroup one({"cuda:0"});
  one.launch();
  FakeGroup apart({"cuda:3"});
  EXPECT_EQ(one.drained, 1);
}

TEST(DeviceTurn, WithoutDevicesNobodyWaits) {
  FakeGroup one({}), two({});
  one.launch();
  two.launch();
  EXPECT_EQ(one.drained + two.drained, 0);
}

TEST(DeviceTurn, NeverAreTwoUnderWayAtOnce) {
  constexpr int kSteps = 2000;
  FakeGroup groups[] = {FakeGroup({"cuda:0"}), FakeGroup({"cuda:0"})};
  std::atomic<int> both = 0;
  std::vector<std::thread> threads;
  for (int own : {0, 1})
    threads.emplace_back([&, own] {
      for (int i = 0; i < kSteps; ++i) {
        const auto held = groups[own].turn.take();
        groups[own].busy = true;
        both += groups[1 - own].busy;
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(both, 0);
}

}  // namespace
}  // namespace nanovllm
