#include "engine/alarm_clock.h"

#include <atomic>

#include <gtest/gtest.h>

namespace nanovllm {
namespace {

using namespace std::chrono_literals;

TEST(AlarmClock, RingsOnceWhereAWaitIsTooLong) {
  std::atomic<int> rung = 0;
  AlarmClock clock(80ms, [&] { ++rung; });
  clock.set();
  std::this_thread::sleep_for(500ms);
  EXPECT_EQ(rung, 1);
  EXPECT_TRUE(clock.stop());
  clock.set();
  std::this_thread::sleep_for(300ms);
  EXPECT_EQ(rung, 1);
}

TEST(AlarmClock, IsSilentWhereWaitsAreShort) {
  std::atomic<int> rung = 0;
  AlarmClock clock(1s, [&] { ++rung; });
  for (int i = 0; i < 30; ++i) {
    clock.set();
    std::this_thread::sleep_for(50ms);
    EXPECT_FALSE(clock.stop());
  }
  std::this_thread::sleep_for(100ms);
  EXPECT_EQ(rung, 0);
}

}  // namespace
}  // namespace nanovllm
