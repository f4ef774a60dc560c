#include "constrain/module/compiler_process.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <ctime>

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "constrain/limits.h"
#include "constrain/module/messages.h"
#include "core/check.h"

namespace nanovllm {
namespace {

constexpr int kMaxProcesses = 2;
constexpr uint64_t kMaxMessageBytes = uint64_t{1} << 30;
// A start reads the vocabulary, which does not count as compilation. One that is slower than this
// does not run at all.
constexpr int64_t kWaitNs = 30'000'000'000;
constexpr auto kCompileNs = static_cast<int64_t>(kMaxCompileSeconds * 1e9);
constexpr int64_t kLookNs = 50'000'000;  ///< between looks at the processor time

/// 0 where the clock cannot be read.
int64_t time_ns(clockid_t clock) {
  timespec now{};
  if (::clock_gettime(clock, &now) != 0) return 0;
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

int64_t now_ns() { return time_ns(CLOCK_MONOTONIC); }

/// The helper has nothing of this process but its end of the socket, as standard input and output:
/// no files, no environment, no terminal's signals.
pid_t spawn(const std::string& program, int socket) {
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_adddup2(&files, socket, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&files, socket, STDOUT_FILENO);
  posix_spawn_file_actions_addopen(&files, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addclosefrom_np(&files, STDERR_FILENO + 1);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setpgroup(&attributes, 0);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETPGROUP);
  std::string name = program;
  char* arguments[] = {name.data(), nullptr};
  char* environment[] = {nullptr};
  pid_t pid = -1;
  const int problem =
      ::posix_spawn(&pid, program.c_str(), &files, &attributes, arguments, environment);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&files);
  check(problem == 0, "{} cannot be started: error {}", program, problem);
  return pid;
}

}  // namespace

CompilerProcess::CompilerProcess(const std::string& program,
                                 const std::string& vocabulary_message) {
  int ends[2] = {-1, -1};
  check(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0,
        "a socket for {} cannot be made: error {}", program, errno);
  socket_ = ends[0];
  try {
    pid_ = spawn(program, ends[1]);
  } catch (...) {
    ::close(ends[0]);
    ::close(ends[1]);
    throw;
  }
  ::close(ends[1]);
  alive_ = true;
  deadline_ns_ = now_ns() + kWaitNs;
  std::string ready;
  if (!send(vocabulary_message) || !receive(ready)) end();
  check(alive_, "{} does not start", program);
}

CompilerProcess::~CompilerProcess() { end(); }

void CompilerProcess::end() {
  if (socket_ >= 0) ::close(socket_);
  socket_ = -1;
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  pid_ = -1;
  alive_ = false;
}

bool CompilerProcess::is_alive() {
  if (alive_ && ::waitpid(pid_, nullptr, WNOHANG) != 0) {
    pid_ = -1;  // another process may have the number by now
    end();
  }
  return alive_;
}

int64_t CompilerProcess::processor_ns() const {
  clockid_t clock{};
  return ::clock_getcpuclockid(pid_, &clock) == 0 ? time_ns(clock) : 0;
}

bool CompilerProcess::is_late() const {
  return now_ns() >= deadline_ns_ || processor_ns() >= processor_limit_ns_;
}

bool CompilerProcess::wait_for(short events) const {
  while (!is_late()) {
    const int64_t left = std::clamp<int64_t>(deadline_ns_ - now_ns(), 0, kLookNs);
    pollfd entry{.fd = socket_, .events = events, .revents = 0};
    const int found = ::poll(&entry, 1, static_cast<int>(left / 1'000'000 + 1));
    if (found > 0) return true;
    if (found < 0 && errno != EINTR) return false;
  }
  return false;
}

bool CompilerProcess::send(const std::string& message) {
  MessageWriter out;
  out.add(message);
  const std::string& bytes = out.bytes();
  for (size_t sent = 0; sent < bytes.size();) {
    if (!wait_for(POLLOUT)) return false;
    const ssize_t part =
        ::send(socket_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (part < 0 && errno != EINTR && errno != EAGAIN) return false;
    if (part > 0) sent += static_cast<size_t>(part);
  }
  return true;
}

bool CompilerProcess::receive(std::string& message) {
  const auto read_exactly = [&](char* to, size_t size) {
    for (size_t got = 0; got < size;) {
      if (!wait_for(POLLIN)) return false;
      const ssize_t part = ::recv(socket_, to + got, size - got, MSG_DONTWAIT);
      if (part == 0 || (part < 0 && errno != EINTR && errno != EAGAIN)) return false;
      if (part > 0) got += static_cast<size_t>(part);
    }
    return true;
  };
  uint64_t size = 0;
  if (!read_exactly(reinterpret_cast<char*>(&size), sizeof size) || size > kMaxMessageBytes)
    return false;
  message.resize(size);
  return read_exactly(message.data(), size);
}

std::string CompilerProcess::compile(const GrammarSource& source) {
  deadline_ns_ = now_ns() + kWaitNs;
  processor_limit_ns_ = processor_ns() + kCompileNs;
  MessageWriter out;
  out.add(static_cast<uint64_t>(source.kind));
  out.add(static_cast<uint64_t>(source.after_reasoning));
  out.add(source.text);
  std::string reply;
  if (!send(out.bytes()) || !receive(reply)) {
    const bool late = is_late();
    end();
    check(!late, ErrorKind::invalid_argument,
          "structured_outputs: compilation takes longer than kMaxCompileSeconds, {} s of a "
          "processor",
          kMaxCompileSeconds);
    fail(ErrorKind::invalid_argument,
         "structured_outputs: compilation ended its process (kMaxCompileBytes is {} MiB)",
         kMaxCompileBytes >> 20);
  }
  MessageReader in(reply);
  const auto status = static_cast<CompileStatus>(in.number());
  std::string result = in.text();
  if (status == CompileStatus::done) return result;
  if (status == CompileStatus::out_of_memory) {
    end();
    fail(ErrorKind::invalid_argument,
         "structured_outputs: compilation needs more memory than kMaxCompileBytes, {} MiB",
         kMaxCompileBytes >> 20);
  }
  fail(ErrorKind::invalid_argument, "structured_outputs: {}", result);
}

std::string CompilerPool::compile(const GrammarSource& source) {
  std::unique_ptr<CompilerProcess> process;
  {
    std::unique_lock lock(mutex_);
    idle_again_.wait(lock, [this] { return busy_ < kMaxProcesses; });
    ++busy_;
    if (!idle_.empty()) {
      process = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  const auto give_back = [&] {
    {
      const std::lock_guard lock(mutex_);
      --busy_;
      if (process && process->is_alive()) idle_.push_back(std::move(process));
    }
    idle_again_.notify_one();
  };
  try {
    if (!process || !process->is_alive())
      process = std::make_unique<CompilerProcess>(program_, vocabulary_message_);
    std::string result = process->compile(source);
    give_back();
    return result;
  } catch (...) {
    give_back();
    throw;
  }
}

}  // namespace nanovllm
