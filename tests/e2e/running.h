// Whether a process of somebody else's runs.
#pragma once

#include <chrono>
#include <string>
#include <thread>

#include "e2e/process.h"

namespace nanovllm {

/// Waits until the process runs no more (it may be a zombie that nobody has waited for); false
/// after a minute.
inline bool soon_ends(int pid) {
  const std::string stat = "/proc/" + std::to_string(pid) + "/stat";
  for (int i = 0; i < 600; ++i) {
    const std::string text = std::filesystem::exists(stat) ? file_text(stat) : "";
    const size_t state = text.rfind(") ");
    if (state == std::string::npos || text[state + 2] == 'Z') return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  return false;
}

}  // namespace nanovllm
