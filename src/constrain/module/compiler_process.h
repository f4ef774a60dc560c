// The helper processes that compile grammars. XGrammar's compilation can neither be interrupted nor
// bounded in memory; a process can be ended.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <sys/types.h>

#include "constrain/grammar_module.h"

namespace nanovllm {

/// One helper process: started with the vocabulary, it compiles one source after the other.
class CompilerProcess {
 public:
  /// Throws Error(engine) where the program cannot be started.
  CompilerProcess(const std::string& program, const std::string& vocabulary_message);
  ~CompilerProcess();
  CompilerProcess(const CompilerProcess&) = delete;
  CompilerProcess& operator=(const CompilerProcess&) = delete;

  /// The compiled grammar, serialised. Throws Error(invalid_argument).
  std::string compile(const GrammarSource& source);
  /// False where the process had to be ended, or ended by itself.
  bool is_alive();

 private:
  bool send(const std::string& message);
  bool receive(std::string& message);
  bool wait_for(short events) const;
  /// Processor time of the process so far, of all its threads together.
  int64_t processor_ns() const;
  bool is_late() const;
  void end();

  pid_t pid_ = -1;
  int socket_ = -1;
  bool alive_ = false;
  int64_t deadline_ns_ = 0, processor_limit_ns_ = INT64_MAX;
};

/// Lends processes that are idle, and starts others up to a number.
class CompilerPool {
 public:
  CompilerPool(std::string program, std::string vocabulary_message)
      : program_(std::move(program)), vocabulary_message_(std::move(vocabulary_message)) {}

  /// CompilerProcess::compile() in one of them.
  std::string compile(const GrammarSource& source);

 private:
  const std::string program_, vocabulary_message_;
  std::mutex mutex_;
  std::condition_variable idle_again_;
  std::vector<std::unique_ptr<CompilerProcess>> idle_;
  int busy_ = 0;
};

}  // namespace nanovllm
