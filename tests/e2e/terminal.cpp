#include "e2e/terminal.h"

#include <csignal>
#include <cstdlib>
#include <stdexcept>

#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <sys/wait.h>
#include <unistd.h>

#include "e2e/process.h"

namespace nanovllm {

Terminal::Terminal(const std::vector<std::string>& arguments, int columns, const char* term) {
  std::vector<std::string> all = {NANOVLLM_BINARY_DIR "/bin/nanovllm"};
  all.insert(all.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (std::string& argument : all) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  winsize size{};
  size.ws_row = 40;
  size.ws_col = static_cast<unsigned short>(columns);
  child_ = ::forkpty(&master_, nullptr, nullptr, &size);
  if (child_ < 0) throw std::runtime_error("forkpty");
  if (child_ > 0) return;
  ::setenv("TERM", term, 1);
  ::setenv("NANOVLLM_DEVICE", "cpu", 1);
  ::setenv("NANOVLLM_THREADS", "1", 1);
  ::execv(pointers[0], pointers.data());
  ::_exit(127);
}

Terminal::~Terminal() {
  if (child_ > 0) {
    ::kill(child_, SIGKILL);
    ::waitpid(child_, nullptr, 0);
  }
  ::close(master_);
}

void Terminal::type(const std::string& keys) {
  size_t written = 0;
  while (written < keys.size()) {
    const ssize_t n =
        ::write(master_, keys.data() + written, std::min<size_t>(keys.size() - written, 512));
    ASSERT_GT(n, 0);
    written += static_cast<size_t>(n);
    read_some(std::chrono::milliseconds(0));  // a terminal that is not read stops reading
  }
}

void Terminal::send(int signal) { ::kill(child_, signal); }

bool Terminal::read_some(std::chrono::milliseconds patience) {
  pollfd ready{master_, POLLIN, 0};
  if (::poll(&ready, 1, static_cast<int>(patience.count())) <= 0) return true;
  char buffer[4096];
  const ssize_t n = ::read(master_, buffer, sizeof buffer);
  if (n > 0) unseen_.append(buffer, static_cast<size_t>(n));
  return n > 0;  // a terminal that its program has left gives an error
}

std::string Terminal::wait_for(const std::string& text) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (unseen_.find(text) == std::string::npos) {
    const bool open = read_some(std::chrono::milliseconds(100));
    if (open && std::chrono::steady_clock::now() < deadline) continue;
    ADD_FAILURE() << "\"" << text << "\" did not come after: " << without_escapes(unseen_);
    return "";
  }
  const size_t end = unseen_.find(text) + text.size();
  const std::string seen = unseen_.substr(0, end);
  unseen_.erase(0, end);
  return seen;
}

std::string Terminal::rest() {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (read_some(std::chrono::milliseconds(100)))
    if (std::chrono::steady_clock::now() > deadline) {
      ADD_FAILURE() << "the program does not end after: " << without_escapes(unseen_);
      break;
    }
  return std::exchange(unseen_, "");
}

int Terminal::exit_code() {
  unseen_ = rest();
  int status = 0;
  ::waitpid(child_, &status, 0);
  child_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

std::string without_escapes(const std::string& text) {
  std::string plain;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\x1b') {
      if (text[i] != '\r' && text[i] != '\a') plain += text[i];
      continue;
    }
    if (i + 1 < text.size() && text[i + 1] == '[') {  // parameters, then a letter
      i += 2;
      while (i < text.size() && (text[i] < '@' || text[i] > '~')) ++i;
    } else {
      ++i;
    }
  }
  return plain;
}

}  // namespace nanovllm
