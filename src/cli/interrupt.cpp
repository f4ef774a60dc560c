#include "cli/interrupt.h"

#include <csignal>

#include <unistd.h>

namespace nanovllm::cli {
namespace {

// A signal handler can reach nothing but a global: this and main.cpp's are all of the program.
volatile std::sig_atomic_t signal_received = 0;

void on_signal(int signal) {
  if (signal_received != 0) ::_exit(128 + signal);
  signal_received = signal;
}

void handle(int signal, void (*handler)(int)) {
  struct sigaction action {};
  action.sa_handler = handler;
  sigemptyset(&action.sa_mask);
  action.sa_flags = 0;  // no SA_RESTART: a read that waits for input is to return
  ::sigaction(signal, &action, nullptr);
}

}  // namespace

Interrupt::Interrupt() {
  signal_received = 0;
  handle(SIGINT, on_signal);
  handle(SIGTERM, on_signal);
}

Interrupt::~Interrupt() {
  handle(SIGINT, SIG_DFL);
  handle(SIGTERM, SIG_DFL);
}

bool Interrupt::requested() const { return signal_received != 0; }

}  // namespace nanovllm::cli
