#include "cli/terminal/interrupt.h"

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>

#include <sys/eventfd.h>
#include <unistd.h>

#include "core/check.h"

namespace nanovllm::cli {
namespace {

// A signal handler can reach nothing but globals: these and main.cpp's are all of the program.
std::atomic<int> signal_received = 0;
std::atomic<int> wake_descriptor = -1;
std::atomic<const char*> first_notice = "";
static_assert(std::atomic<int>::is_always_lock_free);

void wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_descriptor, &one, sizeof one);
}

void on_signal(int signal) {
  if (signal_received.exchange(signal) != 0) ::_exit(128 + signal);
  const int error = errno;
  const char* notice = first_notice;
  wake();
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, notice, std::strlen(notice));
  errno = error;
}

void set_notice(const char* notice) { first_notice = ::isatty(STDERR_FILENO) ? notice : ""; }

void handle(int signal, void (*handler)(int)) {
  struct sigaction action {};
  action.sa_handler = handler;
  sigemptyset(&action.sa_mask);
  action.sa_flags = 0;  // no SA_RESTART: a read that waits for input is to return
  ::sigaction(signal, &action, nullptr);
}

}  // namespace

Interrupt::Interrupt(const char* notice) : wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  check(wake_ >= 0, "cannot wait for signals: {}", std::strerror(errno));
  wake_descriptor = wake_;
  take(notice);
  handle(SIGINT, on_signal);
  handle(SIGTERM, on_signal);
}

Interrupt::~Interrupt() {
  handle(SIGINT, SIG_DFL);
  handle(SIGTERM, SIG_DFL);
  ::close(wake_);
}

int Interrupt::signal() const { return signal_received; }

int Interrupt::take(const char* notice) {
  set_notice(notice);
  const int signal = signal_received.exchange(0);
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t drained = ::read(wake_, &count, sizeof count);
  if (requested()) wake();  // the next one came meanwhile, and its wake-up is gone
  return signal;
}

}  // namespace nanovllm::cli
