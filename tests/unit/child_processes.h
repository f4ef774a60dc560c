// The processes that a test's own has started.
#pragma once

#include <filesystem>
#include <fstream>
#include <vector>

#include <sys/types.h>

namespace nanovllm {

inline std::vector<pid_t> child_processes() {
  std::vector<pid_t> found;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream file(task.path() / "children");
    for (pid_t pid = 0; file >> pid;) found.push_back(pid);
  }
  return found;
}

}  // namespace nanovllm
