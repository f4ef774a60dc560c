// /metrics: Prometheus' text format under vLLM's names (vllm/v1/metrics/loggers.py). Counted on the
// I/O thread from what the engine delivers; the engine's thread does nothing for it.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "nanovllm/async_llm.h"

namespace nanovllm::server {

class Histogram {
 public:
  explicit Histogram(std::vector<double> bounds)
      : bounds_(std::move(bounds)), counts_(bounds_.size() + 1) {}
  void add(double value, int64_t times = 1);
  void write(std::string& out, std::string_view name, std::string_view labels) const;

 private:
  std::vector<double> bounds_;
  std::vector<int64_t> counts_;  // not cumulative; the last is beyond all bounds
  double sum_ = 0;
};

/// Belongs to the I/O thread.
class Metrics {
 public:
  Metrics();
  void add_request(int64_t prompt_tokens, const SamplingParams& params);
  /// The engine's outputs of one request and step.
  void add_output(const RequestOutput& output);
  /// The engine's counters after a step, or several.
  void add_steps(const EngineStats& now);
  void add_http(std::string_view handler, std::string_view method, int status, double seconds);
  void add_rejection(QueueFull::Limit limit);

  /// The page. `model` is a label; stats as of now; `step_age` as AsyncLLM::seconds_in_step().
  std::string page(const std::string& model, const EngineStats& stats, const EngineInfo& info,
                   double step_age) const;

 private:
  struct Live {
    int64_t generated = 0;                                    // tokens so far, of all answers
    std::vector<std::chrono::steady_clock::time_point> last;  // of each answer
  };
  void add_tokens(Live& live, const RequestOutput& output);

  std::unordered_map<int64_t, Live> live_;
  std::map<std::string, int64_t> finished_;                    // by reason
  std::map<std::vector<std::string>, int64_t> http_requests_;  // handler, method, status
  std::map<std::string, Histogram> http_seconds_;              // by handler
  int64_t rejected_reqs_ = 0, rejected_tokens_ = 0, failed_numbers_ = 0;
  EngineStats stepped_;  // as of the last add_steps()
  Histogram step_tokens_, gap_, first_token_, per_token_, whole_, queue_, inference_, prefill_,
      decode_, prompt_tokens_, generation_tokens_, max_tokens_, params_n_;
};

}  // namespace nanovllm::server
