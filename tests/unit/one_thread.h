// A process that may start one more thread, and no second one beside it.
#pragma once

#include <fstream>

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

namespace nanovllm {

/// While it lives, a thread's stack takes most of the memory that this process may yet have.
class OneThread {
 public:
  OneThread() {
    constexpr size_t kStack = size_t{1} << 30;
    ::pthread_getattr_default_np(&before_);
    pthread_attr_t large;
    ::pthread_getattr_default_np(&large);
    ::pthread_attr_setstacksize(&large, kStack);
    ::pthread_setattr_default_np(&large);
    ::pthread_attr_destroy(&large);
    size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    ::getrlimit(RLIMIT_AS, &limit_);
    rlimit low = limit_;
    low.rlim_cur = pages * static_cast<size_t>(::sysconf(_SC_PAGESIZE)) + kStack + kStack / 2;
    ::setrlimit(RLIMIT_AS, &low);
  }
  ~OneThread() {
    ::setrlimit(RLIMIT_AS, &limit_);
    ::pthread_setattr_default_np(&before_);
    ::pthread_attr_destroy(&before_);
  }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  pthread_attr_t before_{};
  rlimit limit_{};
};

}  // namespace nanovllm
