// Many streams at a fixed pace: the times between two tokens as a client sees them, and what a
// stream takes of memory. `stream_timing MODEL [STREAMS] [SECONDS]`; bench/serve_bench.py runs it.
//
// The engine's thread waits for a clock after each step, so that the model's speed is not in the
// figures as long as its step is shorter than the period; steps that are not are counted. The
// client is a process of its own and reads without looking: its cost is that of the system calls.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include <arpa/inet.h>
#include <fmt/format.h>
#include <malloc.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/check.h"
#include "core/seconds.h"
#include "server/server.h"

namespace nanovllm {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kPeriod = std::chrono::milliseconds(20);

sockaddr_in loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

int free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = loopback(0);
  socklen_t size = sizeof address;
  ::bind(fd, reinterpret_cast<sockaddr*>(&address), size);
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  ::close(fd);
  return ntohs(address.sin_port);
}

/// The bytes that this process has allocated, but for large blocks such as the KV cache.
int64_t heap_bytes() { return static_cast<int64_t>(::mallinfo2().uordblks); }
int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * ::getpagesize();
}

/// One byte from the other process.
void wait_for(int pipe) {
  char byte = 0;
  check(::read(pipe, &byte, 1) == 1, ErrorKind::engine, "the other process has ended");
}
void tell(int pipe) { (void)!::write(pipe, "x", 1); }

int open_stream(int port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in address = loopback(port);
  check(::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0,
        ErrorKind::engine, "no connection to port {}", port);
  const std::string body =
      R"({"prompt": "x", "max_tokens": 1000, "stream": true, "ignore_eos": true, "temperature": 0})";
  const std::string request = fmt::format(
      "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
      "Content-Length: {}\r\n\r\n{}",
      body.size(), body);
  (void)!::write(fd, request.data(), request.size());
  return fd;
}

/// The client: seconds between two reads of a stream, once all of them have begun.
std::vector<double> read_gaps(int port, size_t streams, double seconds) {
  const int poll = ::epoll_create1(EPOLL_CLOEXEC);
  std::vector<int> sockets;
  std::vector<Clock::time_point> last(streams);
  for (size_t i = 0; i < streams; ++i) {
    sockets.push_back(open_stream(port));
    epoll_event event{.events = EPOLLIN, .data = {.u64 = i}};
    ::epoll_ctl(poll, EPOLL_CTL_ADD, sockets.back(), &event);
  }
  std::vector<double> gaps;
  std::vector<char> bytes(1 << 16);
  std::vector<epoll_event> events(streams);
  size_t begun = 0;
  Clock::time_point begin;
  while (begun < streams || seconds_since(begin) < seconds) {
    const int count = ::epoll_wait(poll, events.data(), static_cast<int>(streams), -1);
    for (int i = 0; i < count; ++i) {
      const size_t stream = events[static_cast<size_t>(i)].data.u64;
      check(::read(sockets[stream], bytes.data(), bytes.size()) > 0, ErrorKind::engine,
            "a stream has ended before the last has begun");
      const auto now = Clock::now();
      begun += last[stream] == Clock::time_point();
      if (begun == streams && begin == Clock::time_point()) begin = now;
      if (begin != Clock::time_point() && last[stream] >= begin)
        gaps.push_back(to_seconds(now - last[stream]));
      last[stream] = now;
    }
  }
  return gaps;
}

void report(std::vector<double> gaps, size_t streams) {
  check(!gaps.empty(), ErrorKind::engine, "no stream has had two tokens");
  std::ranges::sort(gaps);
  const auto at = [&](double share) {
    return 1000 * gaps[static_cast<size_t>(share * static_cast<double>(gaps.size() - 1))];
  };
  const double period = 1000 * to_seconds(kPeriod);
  fmt::print(
      "{} streams, gap between tokens: median {:.1f}, p90 {:+.1f}, p99 {:+.1f}, longest "
      "{:+.1f} ms beyond {:.0f} ({} gaps)\n",
      streams, at(0.5), at(0.9) - period, at(0.99) - period, at(1) - period, period, gaps.size());
  std::fflush(stdout);
}

void run(const std::string& model, size_t streams, double seconds) {
  int to_client[2], to_server[2];
  check(::pipe(to_client) == 0 && ::pipe(to_server) == 0, ErrorKind::engine, "no pipe");
  const int port = free_port();
  const pid_t client = ::fork();
  if (client == 0) {
    wait_for(to_client[0]);
    auto gaps = read_gaps(port, streams, seconds);
    tell(to_server[1]);
    wait_for(to_client[0]);  // the memory is read while the streams are open
    report(std::move(gaps), streams);
    ::_exit(0);
  }
  server::ServerOptions options;
  options.model = model;
  options.engine.device = "cpu";
  options.engine.num_threads = 1;
  options.engine.load_format = "dummy";
  options.engine.max_num_seqs = static_cast<int64_t>(streams);
  options.engine.max_num_batched_tokens = 2 * static_cast<int64_t>(streams);  // all in one step
  options.engine.max_model_len = 1088;
  options.http.port = port;
  Clock::time_point next = Clock::now();
  size_t steps = 0, late = 0;
  options.embedding.take = [&](std::vector<RequestOutput>& outputs) {
    next += kPeriod;
    if (2 * outputs.size() > streams) {
      ++steps;
      late += Clock::now() > next;
    }
    next = std::max(next, Clock::now());
    std::this_thread::sleep_until(next);
  };
  std::thread watcher;
  options.embedding.on_ready = [&](const server::EmbeddedServer& server) {
    watcher = std::thread([&, stop = server.stop] {
      const int64_t heap = heap_bytes(), resident = resident_bytes();
      tell(to_client[1]);
      wait_for(to_server[0]);
      const auto count = static_cast<int64_t>(streams);
      fmt::print(
          "stream, with its sequence: {} bytes of the heap, {} resident with what it touches "
          "of the KV cache and the workspace\n",
          (heap_bytes() - heap) / count, (resident_bytes() - resident) / count);
      std::fflush(stdout);
      tell(to_client[1]);
      ::waitpid(client, nullptr, 0);
      stop();
    });
  };
  const server::ServerLog log{.note = [](const std::string&) {},
                              .request = [](const std::string&) {}};
  server::serve(options, log);
  watcher.join();
  fmt::print("steps of most streams that took longer than the period: {} of {}\n", late, steps);
}

}  // namespace
}  // namespace nanovllm

int main(int argc, char** argv) {
  if (argc < 2) return std::fprintf(stderr, "stream_timing MODEL [STREAMS] [SECONDS]\n"), 2;
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
  try {
    nanovllm::run(argv[1], argc > 2 ? std::stoul(argv[2]) : 1000,
                  argc > 3 ? std::stod(argv[3]) : 5);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "stream_timing: %s\n", error.what());
    return 1;
  }
  return 0;
}
