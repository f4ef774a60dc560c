// An LLM that many threads share: one engine thread, callers that never wait for it.
//
//   using Outputs = std::span<nanovllm::RequestOutput>;
//   nanovllm::AsyncLLM llm("path/to/Qwen3-0.6B", {}, {}, [&](Outputs step) {
//     for (auto& output : step) deliver(std::move(output));
//   });
//   const int64_t id = llm.new_request_id();
//   llm.add_request(id, "The sky was", {.max_tokens = 64});
//
// Requests go in through a mailbox and come out as one delivery a step. No lock is held while a
// step runs, and an engine without requests sleeps.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "nanovllm/llm.h"

namespace nanovllm {

/// Limits on requests that wait to be scheduled. 0: no limit.
struct QueueLimits {
  int64_t max_num_queued_reqs = 0;
  int64_t max_num_queued_tokens = 0;  ///< prompt tokens; n times those of a request with n answers
};

/// A request that a queue limit refused.
class QueueFull : public Error {
 public:
  enum class Limit { requests, tokens };
  QueueFull(Limit limit, const std::string& message);
  Limit limit() const noexcept { return limit_; }

 private:
  Limit limit_;
};

/// Options of a request beside its sampling.
struct RequestOptions {
  /// Seconds from now after which the request is aborted, with the reason in RequestOutput::error;
  /// 0: none.
  double timeout = 0;
};

/// All methods may be called from any thread.
class AsyncLLM {
 public:
  /// Called from the engine's thread, once a step, with the outputs of all requests that have news.
  /// It must not block or throw, and may move the outputs away. RequestOutput::request_id is the id
  /// that the caller gave. Every accepted request gets exactly one output that is finished.
  using Sink = std::function<void(std::span<RequestOutput>)>;

  /// Loads `model` as LLM does, and throws as it does; `sink` may not be empty.
  AsyncLLM(const std::string& model, const EngineConfig& config, const QueueLimits& limits,
           Sink sink);
  /// The same over an LLM that has no requests.
  AsyncLLM(LLM llm, const QueueLimits& limits, Sink sink);
  /// Aborts what still runs, delivers the outputs and waits for the engine's thread.
  ~AsyncLLM();
  AsyncLLM(const AsyncLLM&) = delete;
  AsyncLLM& operator=(const AsyncLLM&) = delete;

  /// An id that no other call has given. An abort of it holds also before it is added; of ids that
  /// are not added, the last 65,536 are remembered.
  int64_t new_request_id();
  /// Checks the request in full, on the calling thread, and hands it to the engine. `request_id`
  /// must not be that of a live request. Throws Error: invalid_argument (the request is not
  /// acceptable), unavailable (QueueFull, or the engine is draining), engine (it has failed).
  void add_request(int64_t request_id, const Prompt& prompt, const SamplingParams& params = {},
                   const RequestOptions& options = {});
  /// Ends a request before the next step, also one that is still to be added under an id of
  /// new_request_id(); an unknown or finished id is ignored.
  void abort_request(int64_t request_id);
  /// Forgets, before the next step, all cached prefixes that no running request uses.
  void reset_prefix_cache();

  /// Gives `take`, on the engine's thread and before the next step, what LLM::snapshot(most) gives;
  /// an engine without requests wakes up for it. `take` must not block or throw; once the engine
  /// has failed it may not be called.
  void request_snapshot(int64_t most, std::function<void(EngineSnapshot)> take);

  /// Refuses new requests from now on; accepted requests run to their end.
  void drain();
  /// Waits until the engine has no requests; false after `seconds`.
  bool wait_until_idle(double seconds);
  /// Whether add_request() would take a request that is acceptable.
  bool is_serving() const;
  /// Seconds that the engine's thread has been at its present step, delivery included; 0 where it
  /// has nothing to do. An engine that hangs shows here alone.
  double seconds_in_step() const;
  /// Why the engine failed; empty while it lives.
  std::string failure() const;
  /// As of the last step.
  EngineStats stats() const;
  /// Requests accepted and not finished.
  int64_t num_live() const;

  /// Only its const methods may be called, from any thread: the prompt of a conversation, the
  /// tokenizer, facts and defaults.
  const LLM& llm() const;

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace nanovllm
