// Preloaded into a program: after SIGUSR1 the next thread that begins a parallel region stays there
// for ever, as in the call of a device that hangs.
#include <atomic>

#include <dlfcn.h>
#include <signal.h>
#include <unistd.h>

namespace {
std::atomic<bool> is_asked = false;
[[gnu::constructor]] void listen_for_signal() {
  struct sigaction action {};
  action.sa_handler = [](int) { is_asked = true; };
  ::sigaction(SIGUSR1, &action, nullptr);
}
}  // namespace

extern "C" void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags) {
  if (is_asked.exchange(false))
    while (true) ::pause();
  static const auto parallel =
      reinterpret_cast<decltype(&GOMP_parallel)>(::dlsym(RTLD_NEXT, "GOMP_parallel"));
  parallel(body, data, threads, flags);
}
