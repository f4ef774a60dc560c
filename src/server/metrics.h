// /metrics: Prometheus' text format under vLLM's names (vllm/v1/metrics/loggers.py). Counted on the
// I/O thread from what the engine delivers; the engine's thread does nothing for it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "nanovllm/llm.h"

namespace nanovllm::server {

class Histogram {
 public:
  explicit Histogram(std::vector<double> bounds)
      : bounds_(std::move(bounds)), counts_(bounds_.size() + 1) {}
  void add(double value);
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
  void add_http(std::string_view handler, std::string_view method, int status, double seconds);
  void add_rejection(bool by_tokens);

  /// The page. `model` is a label; stats as of now.
  std::string page(const std::string& model, const EngineStats& stats,
                   const EngineInfo& info) const;

 private:
  struct Live {
    double last_token = 0;  // seconds since the request came
    int64_t prompt_tokens = 0, generated = 0;
  };

  std::map<int64_t, Live> live_;                               // by request
  std::map<std::string, int64_t> finished_;                    // by reason
  std::map<std::vector<std::string>, int64_t> http_requests_;  // handler, method, status
  std::map<std::string, Histogram> http_seconds_;              // by handler
  int64_t rejected_reqs_ = 0, rejected_tokens_ = 0, failed_numbers_ = 0;
  Histogram first_token_, between_tokens_, per_token_, whole_, queue_, inference_, prefill_,
      decode_, prompt_tokens_, generation_tokens_, max_tokens_, params_n_;
};

}  // namespace nanovllm::server
