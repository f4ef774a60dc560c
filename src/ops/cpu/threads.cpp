#include "ops/cpu/threads.h"

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <latch>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include <sched.h>

#include "core/check.h"
#include "core/limits.h"

namespace nanovllm::cpu {
namespace {

/// Cores behind the processors of the affinity mask: siblings of one core share a line in sysfs.
int physical_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 1;
  std::set<std::string> cores;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    std::ifstream file(
        fmt::format("/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list", cpu));
    std::string siblings;
    if (!std::getline(file, siblings)) siblings = fmt::format("cpu {}", cpu);
    cores.insert(siblings);
  }
  return std::max(1, static_cast<int>(cores.size()));
}

/// Processors' worth of time that the container may use (cgroup v2 cpu.max: "quota period"), or a
/// large number.
int cgroup_quota() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  double quota = 0, period = 0;
  if (!(file >> quota >> period) || quota <= 0 || period <= 0) return 1 << 20;
  return std::max(1, static_cast<int>(std::ceil(quota / period)));
}

}  // namespace

int default_num_threads() {
  if (const char* text = std::getenv("OMP_NUM_THREADS")) {
    const long threads = std::strtol(text, nullptr, 10);
    check(threads <= kMaxThreads, ErrorKind::invalid_argument,
          "OMP_NUM_THREADS is {}: it must be between 1 and {}", threads, kMaxThreads);
    if (threads > 0) return static_cast<int>(threads);
  }
  return std::min(physical_cores(), cgroup_quota());
}

void check_can_start(int threads) {
  std::latch all_started(1);
  std::vector<std::thread> started;
  std::string refusal;
  try {
    for (int i = 1; i < threads; ++i) started.emplace_back([&] { all_started.wait(); });
  } catch (const std::system_error& error) {
    refusal = error.what();
  }
  all_started.count_down();
  for (std::thread& thread : started) thread.join();
  check(refusal.empty(), ErrorKind::device,
        "{} CPU threads cannot be started: {}; raise the limit on processes (ulimit -u), or use "
        "fewer threads",
        threads, refusal);
}

}  // namespace nanovllm::cpu
