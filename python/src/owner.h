// An engine belongs to the process that made it: its threads do not exist in a child of fork().
#pragma once

#include <shared_mutex>
#include <stdexcept>

#include <unistd.h>

#include "nanovllm/llm.h"

namespace nanovllm::python {

/// An LLM whose const side may be used: exit() waits meanwhile.
struct Pinned {
  std::shared_lock<std::shared_mutex> lock;
  const LLM& llm;
};

class Owner {
 public:
  bool is_here() const { return ::getpid() == process_; }
  /// Throws (RuntimeError in Python) in another process than that of the construction.
  void check() const {
    if (!is_here())
      throw std::runtime_error(
          "this engine was made before fork() and works in the process that made it alone: start "
          "processes with the method `spawn`");
  }

 private:
  const pid_t process_ = ::getpid();
};

}  // namespace nanovllm::python
