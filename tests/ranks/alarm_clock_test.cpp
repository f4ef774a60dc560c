#include "ranks/alarm_clock.h"

#include <atomic>
#include <csignal>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace nanovllm {
namespace {

using namespace std::chrono_literals;

TEST(AlarmClock, RingsOnceWhereAWaitIsTooLong) {
  std::atomic<int> rung = 0;
  AlarmClock clock(80ms, [&] { ++rung; });
  clock.set();
  while (rung == 0) std::this_thread::sleep_for(10ms);
  std::this_thread::sleep_for(300ms);
  EXPECT_EQ(rung, 1);
  EXPECT_TRUE(clock.stop());
  clock.set();
  std::this_thread::sleep_for(300ms);
  EXPECT_EQ(rung, 1);
}

TEST(AlarmClock, IsSilentWhereWaitsAreShort) {
  std::atomic<int> rung = 0;
  AlarmClock clock(3s, [&] { ++rung; });
  for (int i = 0; i < 70; ++i) {
    clock.set();
    std::this_thread::sleep_for(50ms);
    EXPECT_FALSE(clock.stop());
  }
  EXPECT_EQ(rung, 0);
}

TEST(AlarmClock, TimeInWhichTheProcessIsStoppedDoesNotCount) {
  const pid_t self = ::getpid(), helper = ::fork();
  ASSERT_GE(helper, 0);
  if (helper == 0) {
    while (true) {  // again and again: the stop may come late
      ::sleep(3);
      ::kill(self, SIGCONT);
    }
  }
  std::atomic<int> rung = 0;
  AlarmClock clock(2500ms, [&] { ++rung; });
  clock.set();
  ::raise(SIGSTOP);
  std::this_thread::sleep_for(300ms);
  EXPECT_EQ(rung, 0);
  while (rung == 0) std::this_thread::sleep_for(10ms);
  ::kill(helper, SIGKILL);
  EXPECT_EQ(::waitpid(helper, nullptr, 0), helper);
}

}  // namespace
}  // namespace nanovllm
