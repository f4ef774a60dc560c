// LLMEngine: requests in, outputs out. Scheduler, runner and tokenizer meet here and nowhere else.
//
// Two boundaries turn exceptions into values. A request is checked when it is added, and fails
// alone. Anything thrown inside a step ends the engine: its live requests are lost, and every later
// call throws the same message.
#pragma once

#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "nanovllm/llm.h"

#include "engine/request.h"
#include "engine/runner.h"
#include "engine/scheduler/scheduler.h"
#include "kv_events/publisher.h"

namespace nanovllm {

class LLMEngine {
 public:
  /// `tokenizer` may be null: token ids in, token ids out. `eos` are the model's end-of-sequence
  /// ids.
  LLMEngine(std::unique_ptr<Runner> runner, const ModelConfig& model, const EngineConfig& config,
            std::shared_ptr<const Tokenizer> tokenizer, std::vector<int32_t> eos);

  /// Why add_request() would refuse this, or nothing. May be called from any thread.
  std::optional<std::string> refusal(const std::vector<int32_t>& prompt,
                                     const SamplingParams& params) const;
  // The functions below do what LLM's of the same names do.
  // Each answer follows `grammar`, where there is one: with a matcher of its own.
  int64_t add_request(const std::vector<int32_t>& prompt, const SamplingParams& params,
                      const std::shared_ptr<const Grammar>& grammar = nullptr);
  /// Queues the output of a request that is not acceptable. It does not have the prompt, which may
  /// be of any size.
  int64_t refuse_request(std::string error);
  std::vector<RequestOutput> step();
  void abort_request(int64_t request_id);
  bool is_finished() const;
  void reset_prefix_cache();
  /// Gives `publisher`, if there is one, the events of the prefix cache from now on, a step's at
  /// its end.
  void publish_events_to(std::unique_ptr<KvEventPublisher> publisher);

  EngineStats stats() const;
  EngineSnapshot snapshot(int64_t most) const;
  const MemoryPlan& memory() const { return runner_->memory(); }  ///< of one rank

 private:
  using Clock = std::chrono::steady_clock;

  void add_answer(Request& request, int index, const std::vector<int32_t>& prompt,
                  const SamplingParams& params, int64_t max_tokens, int64_t seed,
                  std::unique_ptr<TokenMatcher> matcher);
  void run_step(std::vector<RequestOutput>& outputs);
  bool launch_step();
  void finish_launch();
  void process_step();
  void collect_logprobs(const Plan& plan, const StepResult& result);
  void advance(const Plan& plan);
  void add_text(Answer& answer);
  void take_finished();
  void note_news(Request& request);
  void report_news(std::vector<RequestOutput>& outputs);
  void publish_events();

  std::unique_ptr<Runner> runner_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  const std::vector<int32_t> eos_;
  const int64_t vocab_size_, max_model_len_;
  const uint64_t seed_;
  const bool has_priorities_;
  Scheduler scheduler_;
  std::unique_ptr<KvEventPublisher> publisher_;
  std::unordered_map<int64_t, Request> requests_;  // by id
  std::vector<Request*> news_;                     // requests with something to report, once each
  std::vector<RequestOutput> refused_;             // outputs waiting for the next step()
  // The plans in flight, oldest first: step s is in plans_[s % 2].
  std::array<Plan, 2> plans_;
  int64_t next_id_ = 0, steps_ = 0, steps_processed_ = 0;
  bool needs_masks_ = false;  // the newest step in flight, before its sampling is issued
  double schedule_seconds_ = 0, step_seconds_ = 0;
  std::string dead_;  // why, once a step has failed
};

}  // namespace nanovllm
