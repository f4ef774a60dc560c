#include "e2e/process.h"

#include <array>
#include <cerrno>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

extern char** environ;

namespace nanovllm {
namespace {

using Clock = std::chrono::steady_clock;

struct Pipe {
  int read = -1, write = -1;
  Pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe");
    read = ends[0];
    write = ends[1];
  }
  ~Pipe() {
    close_read();
    close_write();
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  void close_read() {
    if (read >= 0) ::close(read);
    read = -1;
  }
  void close_write() {
    if (write >= 0) ::close(write);
    write = -1;
  }
};

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> list;
  for (std::string& s : strings) list.push_back(s.data());
  list.push_back(nullptr);
  return list;
}

std::vector<std::string> environment_with(const std::map<std::string, std::string>& changes) {
  std::vector<std::string> variables;
  for (char** v = environ; *v; ++v) {
    const std::string variable = *v;
    if (!changes.contains(variable.substr(0, variable.find('=')))) variables.push_back(variable);
  }
  for (const auto& [name, value] : changes) variables.push_back(name + "=" + value);
  return variables;
}

pid_t spawn(const std::filesystem::path& program, std::vector<std::string> arguments,
            const ProcessOptions& options, const Pipe& in, const Pipe& out, const Pipe& err) {
  arguments.insert(arguments.begin(), program.string());
  std::vector<std::string> environment = environment_with(options.environment);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, in.read, STDIN_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, err.write, STDERR_FILENO);
  if (options.output_file.empty())
    ::posix_spawn_file_actions_adddup2(&actions, out.write, STDOUT_FILENO);
  else
    ::posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, options.output_file.c_str(),
                                       O_WRONLY, 0);
  pid_t child = 0;
  const int error = ::posix_spawn(&child, program.c_str(), &actions, nullptr,
                                  pointers(arguments).data(), pointers(environment).data());
  ::posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw std::runtime_error("cannot run " + program.string());
  return child;
}

/// Reads what there is, up to `most` bytes; false at the end.
bool read_some(int descriptor, std::string& text, size_t most = 65536) {
  std::array<char, 65536> buffer;
  const ssize_t n = ::read(descriptor, buffer.data(), most);
  if (n > 0) text.append(buffer.data(), static_cast<size_t>(n));
  return n > 0 || (n < 0 && errno == EINTR);
}

int wait_for(pid_t child) {
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

ProcessResult run_process(const std::filesystem::path& program, std::vector<std::string> arguments,
                          const ProcessOptions& options) {
  Pipe in, out, err;
  if (options.signal_when) ::fcntl(out.write, F_SETPIPE_SZ, 4096);
  const pid_t child = spawn(program, std::move(arguments), options, in, out, err);
  in.close_read();
  out.close_write();
  err.close_write();
  ::signal(SIGPIPE, SIG_IGN);  // a program that does not read its input is none of our business

  ProcessResult result;
  size_t written = 0;
  bool signalled = false, killed = false;
  bool reading_output = true, reading_errors = true;
  const auto deadline = Clock::now() + options.time_limit;
  while (reading_output || reading_errors) {
    const bool all_written = written == options.input.size();
    if (in.write >= 0 && all_written && !options.keep_input_open) in.close_write();
    std::array<pollfd, 3> polls = {{{reading_output ? out.read : -1, POLLIN, 0},
                                    {reading_errors ? err.read : -1, POLLIN, 0},
                                    {all_written ? -1 : in.write, POLLOUT, 0}}};
    ::poll(polls.data(), polls.size(), 100);
    if (result.output.empty()) result.input_before_output = written;
    if (polls[0].revents)
      reading_output =
          read_some(out.read, result.output, options.signal_when && !signalled ? 1 : 65536);
    if (polls[1].revents) reading_errors = read_some(err.read, result.errors);
    if (polls[2].revents) {
      const ssize_t n = ::write(in.write, options.input.data() + written,
                                std::min<size_t>(options.input.size() - written, 4096));
      if (n < 0 && errno != EINTR) in.close_write();
      if (n > 0) written += static_cast<size_t>(n);
    }
    if (options.signal_when && !signalled) {
      if (const int signal = options.signal_when(result.output); signal != 0) {
        ::kill(child, signal);
        signalled = true;
      }
    }
    if (Clock::now() > deadline && !killed) {
      ::kill(child, SIGKILL);
      killed = true;
    }
  }
  result.exit_code = wait_for(child);
  if (killed) result.exit_code = 124;
  return result;
}

ProcessResult nanovllm_program(std::vector<std::string> arguments, const ProcessOptions& options) {
  ProcessOptions with_device = options;
  // Both have an environment twin, so that the arguments of a test win.
  with_device.environment.try_emplace("NANOVLLM_DEVICE", "cpu");
  with_device.environment.try_emplace("NANOVLLM_THREADS", "1");
  return run_process(std::filesystem::path(NANOVLLM_BINARY_DIR) / "bin" / "nanovllm",
                     std::move(arguments), with_device);
}

std::vector<Json> ProcessResult::lines() const { return json_lines(output); }

std::string demo_model() { return NANOVLLM_SOURCE_DIR "/models/demo"; }

std::vector<std::string> with_endless(std::vector<std::string> arguments) {
  arguments.insert(arguments.end(),
                   {"--max-model-len", "65536", "--allow-long-max-model-len", "--cpu-kvcache-bytes",
                    "1G", "--max-tokens", "65000", "--ignore-eos"});
  return arguments;
}

std::vector<Json> json_lines(const std::string& text) {
  std::vector<Json> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(Json::parse(line));
  return lines;
}

std::string file_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void write_file(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

}  // namespace nanovllm
