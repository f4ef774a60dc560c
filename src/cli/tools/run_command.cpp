#include "cli/tools/run_command.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/check.h"
#include "io/utf8.h"

namespace nanovllm::cli {
namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kMaxErrorBytes = 2000;  // of standard error, for the message

/// The variables that a command may see; a list of those that it may not would miss somebody's key.
bool is_harmless(std::string_view name) {
  constexpr std::string_view kNames[] = {"PATH", "HOME", "USER",     "LOGNAME", "SHELL",
                                         "LANG", "TZ",   "LANGUAGE", "TMPDIR"};
  return name.starts_with("LC_") || std::ranges::find(kNames, name) != std::end(kNames);
}

struct Pipe {
  int read = -1, write = -1;
  Pipe() {
    int ends[2];
    check(::pipe2(ends, O_CLOEXEC) == 0, "a pipe cannot be made: {}", std::strerror(errno));
    read = ends[0];
    write = ends[1];
  }
  ~Pipe() {
    close(read);
    close(write);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  static void close(int& end) {
    if (end >= 0) ::close(end);
    end = -1;
  }
};

/// Starts the command on the pipes. Returns 0, or the error.
int spawn(const std::vector<std::string>& command, const Pipe& in, const Pipe& out, const Pipe& err,
          pid_t& pid) {
  std::vector<std::string> texts = command;
  std::vector<char*> arguments, environment;
  for (std::string& text : texts) arguments.push_back(text.data());
  arguments.push_back(nullptr);
  for (char** variable = ::environ; variable && *variable; ++variable) {
    const std::string_view text = *variable;
    if (is_harmless(text.substr(0, text.find('=')))) environment.push_back(*variable);
  }
  environment.push_back(nullptr);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_adddup2(&files, in.read, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&files, out.write, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&files, err.write, STDERR_FILENO);
  posix_spawn_file_actions_addclosefrom_np(&files, STDERR_FILENO + 1);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t signals;
  sigemptyset(&signals);
  posix_spawnattr_setsigmask(&attributes, &signals);
  for (const int ignored : {SIGPIPE, SIGXFSZ}) sigaddset(&signals, ignored);
  posix_spawnattr_setsigdefault(&attributes, &signals);
  posix_spawnattr_setflags(&attributes,
                           POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  const int error =
      ::posix_spawnp(&pid, arguments[0], &files, &attributes, arguments.data(), environment.data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&files);
  return error;
}

/// A command that runs: its group ends with this object.
class Running {
 public:
  explicit Running(pid_t pid) : pid_(pid) {}
  ~Running() {
    ::kill(-pid_, SIGKILL);  // before it is waited for: until then the group's number is taken
    while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  /// Whether it has ended by itself; then `problem` says why that was no success.
  bool has_ended(std::string& problem) const {
    siginfo_t info{};
    const int flags = WEXITED | WNOHANG | WNOWAIT;
    if (::waitid(P_PID, static_cast<id_t>(pid_), &info, flags) != 0 || info.si_pid == 0)
      return false;
    if (info.si_code != CLD_EXITED)
      problem = fmt::format("ended by signal {}", info.si_status);
    else if (info.si_status != 0)
      problem = fmt::format("ended with the exit code {}", info.si_status);
    return true;
  }

 private:
  const pid_t pid_;
};

/// Takes what there is without waiting, and no more than `most` bytes and one. Closes the pipe at
/// its end.
void take(int& end, std::string& text, size_t most) {
  std::array<char, 8192> buffer;
  while (end >= 0 && text.size() <= most) {
    const size_t room = std::min(buffer.size(), most + 1 - text.size());
    const ssize_t n = ::read(end, buffer.data(), room);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) return Pipe::close(end);
    text.append(buffer.data(), static_cast<size_t>(n));
  }
}

/// Writes what goes without waiting. Closes the pipe behind the last byte, or where nobody reads.
void give(int& end, std::string_view& text) {
  while (end >= 0 && !text.empty()) {
    const ssize_t n = ::write(end, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n < 0) return Pipe::close(end);
    text.remove_prefix(static_cast<size_t>(n));
  }
  Pipe::close(end);
}

std::string valid_utf8(std::string_view bytes) {
  std::string text;
  append_utf8_lossy(text, bytes, /*at_end=*/true);
  return text;
}

}  // namespace

CommandResult run_command(const std::vector<std::string>& command, std::string_view input,
                          const Interrupt& interrupt, const CommandLimits& limits) {
  CommandResult result;
  Pipe in, out, err;
  pid_t pid = -1;
  if (const int error = spawn(command, in, out, err, pid); error != 0) {
    result.problem = fmt::format("{} cannot be run: {}", command.at(0), std::strerror(error));
    return result;
  }
  const Running running(pid);
  Pipe::close(in.read);
  Pipe::close(out.write);
  Pipe::close(err.write);
  for (const int end : {in.write, out.read, err.read}) ::fcntl(end, F_SETFL, O_NONBLOCK);
  const auto deadline = Clock::now() + limits.time;
  std::string errors;
  for (bool ended = false; !ended && result.problem.empty();) {
    // First whether it has ended, then what it wrote: all of that is there by then.
    ended = running.has_ended(result.problem);
    give(in.write, input);
    take(out.read, result.output, limits.output_bytes);
    take(err.read, errors, kMaxErrorBytes);
    if (errors.size() > kMaxErrorBytes) Pipe::close(err.read);
    if (result.output.size() > limits.output_bytes)
      result.problem = fmt::format("wrote more than {} KiB", limits.output_bytes >> 10);
    else if (interrupt.requested())
      result.problem = "stopped by the user";
    else if (!ended && Clock::now() >= deadline)
      result.problem = fmt::format("took longer than {} s", limits.time.count() / 1000);
    if (ended || !result.problem.empty()) break;
    std::array<pollfd, 4> polls = {{{in.write, POLLOUT, 0},
                                    {out.read, POLLIN, 0},
                                    {err.read, POLLIN, 0},
                                    {interrupt.descriptor(), POLLIN, 0}}};
    ::poll(polls.data(), polls.size(), 20);  // an end shows in no descriptor that must be there
  }
  if (!result.problem.empty() && !errors.empty())
    result.problem += ": " + one_line(valid_utf8(errors));
  result.output = valid_utf8(result.output);
  return result;
}

}  // namespace nanovllm::cli
