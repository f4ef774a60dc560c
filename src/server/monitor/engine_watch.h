// EngineWatch: notices an engine that hangs. A device or a driver may never return: such an engine
// is not dead, and says nothing.
#pragma once

#include <string>
#include <thread>

#include "server/server.h"

namespace nanovllm::server {

/// Belongs to the I/O thread.
class EngineWatch {
 public:
  /// Both must outlive it.
  EngineWatch(const ServerOptions& options, const ServerLog& log) : options_(options), log_(log) {}

  /// Notes when the engine (null: not made yet) begins to hang, and when it goes on.
  void look(const AsyncLLM* llm);
  bool is_hanging() const { return is_hanging_; }
  std::string why_hanging() const;

  /// For the end of the server: gives up when the engine does not end in time, because others may
  /// wait for the program.
  std::jthread watch_end() const;

 private:
  const ServerOptions& options_;
  const ServerLog& log_;
  bool is_hanging_ = false;
};

}  // namespace nanovllm::server
