#include "server/monitor/metrics.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/seconds.h"

namespace nanovllm::server {
namespace {

std::vector<double> first_token_bounds() {
  return {.001, .005, .01, .02, .04, .06, .08, .1, .25, .5,  .75,
          1,    2.5,  5,   7.5, 10,  20,  40,  80, 160, 640, 2560};
}
std::vector<double> between_bounds() {
  return {.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80};
}
std::vector<double> latency_bounds() {
  return {.3, .5, .8, 1,  1.5, 2,   2.5, 5,   10,   15,  20,
          30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680};
}
std::vector<double> token_bounds() {
  std::vector<double> bounds;
  for (double decade = 1; decade <= 100000; decade *= 10)
    for (const double step : {1, 2, 5}) bounds.push_back(step * decade);
  return bounds;
}

/// The page as it grows: a metric's head, then its series.
struct Page {
  std::string labels;  // of every series that is the model's
  std::string text{};

  void head(std::string_view metric, std::string_view type, std::string_view help) {
    text += fmt::format("# HELP {0} {2}\n# TYPE {0} {1}\n", metric, type, help);
  }
  void add(std::string_view metric, const auto& value, const std::string& more = {}) {
    text += fmt::format("{}{{{}{}}} {}\n", metric, labels, more, value);
  }
  void gauge(std::string_view metric, std::string_view help, const auto& value) {
    head(metric, "gauge", help);
    add(metric, value);
  }
  void counter(const std::string& metric, std::string_view help, int64_t value) {
    head(metric + "_total", "counter", help);
    add(metric + "_total", value);
  }
};

/// As Prometheus' text format has a label's value.
std::string escaped(const std::string& value) {
  std::string out;
  for (const char c : value) {
    if (c == '"' || c == '\\' || c == '\n') out += '\\';
    out += c == '\n' ? 'n' : c;
  }
  return out;
}

void add_engine(Page& page, const EngineStats& s, const EngineInfo& info) {
  page.gauge("vllm:num_requests_running", "Sequences running.", s.running);
  page.gauge("vllm:num_requests_waiting", "Sequences waiting.", s.waiting);
  const std::string by_reason = "vllm:num_requests_waiting_by_reason";
  page.head(by_reason, "gauge", "Sequences waiting, by reason.");
  page.add(by_reason, s.waiting, ",reason=\"capacity\"");
  page.add(by_reason, 0, ",reason=\"deferred\"");
  const double usage = info.num_blocks > 0 ? 1 - static_cast<double>(s.free_blocks) /
                                                     static_cast<double>(info.num_blocks)
                                           : 0;
  page.gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", usage);
  page.head("vllm:cache_config_info", "gauge", "The cache's configuration.");
  page.add("vllm:cache_config_info", 1,
           fmt::format(",block_size=\"{}\",cache_dtype=\"{}\",num_gpu_blocks=\"{}\"",
                       info.block_size, info.kv_cache_dtype, info.num_blocks));
  page.counter("vllm:num_preemptions", "Sequences preempted.", s.preemptions);
  page.counter("vllm:prompt_tokens", "Prompt tokens.", s.prompt_tokens);
  page.counter("vllm:prompt_tokens_cached", "Prompt tokens from the prefix cache.",
               s.cached_prompt_tokens);
  page.counter("vllm:generation_tokens", "Tokens generated.", s.generated_tokens);
  page.counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.",
               s.prompt_tokens);
  page.counter("vllm:prefix_cache_hits", "Prompt tokens found there.", s.cached_prompt_tokens);
}

}  // namespace

void Histogram::add(double value, int64_t times) {
  const auto at = std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin();
  counts_[static_cast<size_t>(at)] += times;
  sum_ += value * static_cast<double>(times);
}

void Histogram::write(std::string& out, std::string_view name, std::string_view labels) const {
  int64_t total = 0;
  for (size_t i = 0; i < counts_.size(); ++i) {
    total += counts_[i];
    const std::string bound = i < bounds_.size() ? fmt::format("{}", bounds_[i]) : "+Inf";
    out += fmt::format("{}_bucket{{{},le=\"{}\"}} {}\n", name, labels, bound, total);
  }
  out +=
      fmt::format("{}_sum{{{}}} {}\n{}_count{{{}}} {}\n", name, labels, sum_, name, labels, total);
}

Metrics::Metrics()
    : step_tokens_({1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}),
      gap_(between_bounds()),
      first_token_(first_token_bounds()),
      per_token_(between_bounds()),
      whole_(latency_bounds()),
      queue_(latency_bounds()),
      inference_(latency_bounds()),
      prefill_(latency_bounds()),
      decode_(latency_bounds()),
      prompt_tokens_(token_bounds()),
      generation_tokens_(token_bounds()),
      max_tokens_(token_bounds()),
      params_n_({1, 2, 5, 10, 20}) {}

void Metrics::add_request(int64_t prompt_tokens, const SamplingParams& params) {
  prompt_tokens_.add(static_cast<double>(prompt_tokens));
  max_tokens_.add(static_cast<double>(params.max_tokens));
  params_n_.add(params.n);
}

void Metrics::add_output(const RequestOutput& output) {
  Live& live = live_[output.request_id];
  const RequestMetrics& m = output.metrics;
  add_tokens(live, output);
  const int64_t generated = live.generated;
  for (const CompletionOutput& answer : output.outputs) {
    if (answer.finish_reason == FinishReason::none) continue;
    ++finished_[to_string(answer.finish_reason)];
    failed_numbers_ += output.failure == RequestFailure::not_finite;
  }
  if (!output.finished) return;
  whole_.add(m.total_time);
  if (m.time_to_first_token > 0) {  // else it ended before, by an abort or a fault
    inference_.add(m.total_time - m.queue_time);
    prefill_.add(m.time_to_first_token - m.queue_time);
    decode_.add(m.total_time - m.time_to_first_token);
  }
  generation_tokens_.add(static_cast<double>(generated));
  if (generated > 1)
    per_token_.add((m.total_time - m.time_to_first_token) / static_cast<double>(generated - 1));
  live_.erase(output.request_id);
}

// A stream brings a token of an answer at a time. An answer that comes whole has the mean of its
// gaps, as often as it has gaps.
void Metrics::add_tokens(Live& live, const RequestOutput& output) {
  const auto now = std::chrono::steady_clock::now();
  const RequestMetrics& m = output.metrics;
  for (const CompletionOutput& answer : output.outputs) {
    const int64_t tokens = std::ssize(answer.token_ids);
    if (tokens == 0) continue;
    if (live.generated == 0) {
      first_token_.add(m.time_to_first_token);
      queue_.add(m.queue_time);
    }
    const auto index = static_cast<size_t>(answer.index);
    if (live.last.size() <= index) live.last.resize(index + 1);
    const bool is_first = live.last[index] == std::chrono::steady_clock::time_point();
    const int64_t gaps = tokens - is_first;
    const double seconds =
        is_first ? m.total_time - m.time_to_first_token : to_seconds(now - live.last[index]);
    if (gaps > 0) gap_.add(seconds / static_cast<double>(gaps), gaps);
    live.last[index] = now;
    live.generated += tokens;
  }
}

// Where several steps lie between two calls each counts with their mean.
void Metrics::add_steps(const EngineStats& now) {
  const int64_t steps = now.steps - stepped_.steps;
  const int64_t tokens =
      now.prompt_tokens - stepped_.prompt_tokens + now.generated_tokens - stepped_.generated_tokens;
  if (steps > 0) step_tokens_.add(static_cast<double>(tokens) / static_cast<double>(steps), steps);
  if (steps > 0) stepped_ = now;
}

void Metrics::add_http(std::string_view handler, std::string_view method, int status,
                       double seconds) {
  ++http_requests_[{std::string(handler), std::string(method), fmt::format("{}xx", status / 100)}];
  http_seconds_.try_emplace(std::string(handler), latency_bounds()).first->second.add(seconds);
}

void Metrics::add_rejection(QueueFull::Limit limit) {
  ++(limit == QueueFull::Limit::tokens ? rejected_tokens_ : rejected_reqs_);
}

std::string Metrics::page(const std::string& model, const EngineStats& stats,
                          const EngineInfo& info, double step_age) const {
  Page page{fmt::format("model_name=\"{}\",engine=\"0\"", escaped(model))};
  add_engine(page, stats, info);
  page.counter("vllm:corrupted_requests", "Requests whose logits were not finite.",
               failed_numbers_);
  page.head("vllm:request_success_total", "counter", "Answers, by the reason of their end.");
  for (const char* reason : {"stop", "length", "abort", "error"}) {
    const auto found = finished_.find(reason);
    page.add("vllm:request_success_total", found == finished_.end() ? 0 : found->second,
             fmt::format(",finished_reason=\"{}\"", reason));
  }
  const std::string rejections = "vllm:admission_rejections_total";
  page.head(rejections, "counter", "Requests refused for a queue limit.");
  page.add(rejections, rejected_reqs_, ",reason=\"max_num_queued_reqs\"");
  page.add(rejections, rejected_tokens_, ",reason=\"max_num_queued_tokens\"");
  page.gauge("nanovllm:engine_step_age_seconds", "Time since the present step began.",
             fmt::format("{:.3f}", step_age));
  const auto add = [&page](std::string_view metric, std::string_view help, const Histogram& h) {
    page.head(metric, "histogram", help);
    h.write(page.text, metric, page.labels);
  };
  add("vllm:time_to_first_token_seconds", "Time to the first token.", first_token_);
  add("vllm:inter_token_latency_seconds", "Time between two tokens of an answer.", gap_);
  add("vllm:iteration_tokens_total", "Prompt and generated tokens of a step.", step_tokens_);
  add("vllm:request_time_per_output_token_seconds", "Time per token after the first.", per_token_);
  add("vllm:e2e_request_latency_seconds", "Time of a request.", whole_);
  add("vllm:request_queue_time_seconds", "Time until first scheduled.", queue_);
  add("vllm:request_inference_time_seconds", "Time after that.", inference_);
  add("vllm:request_prefill_time_seconds", "From scheduled to the first token.", prefill_);
  add("vllm:request_decode_time_seconds", "From the first token to the last.", decode_);
  add("vllm:request_prompt_tokens", "Prompt tokens of a request.", prompt_tokens_);
  add("vllm:request_generation_tokens", "Tokens generated for a request.", generation_tokens_);
  add("vllm:request_max_num_generation_tokens", "Tokens that a request may generate.", max_tokens_);
  add("vllm:request_params_max_tokens", "max_tokens of a request.", max_tokens_);
  add("vllm:request_params_n", "n of a request.", params_n_);
  page.head("http_requests_total", "counter", "HTTP requests.");
  for (const auto& [key, count] : http_requests_)
    page.text +=
        fmt::format("http_requests_total{{handler=\"{}\",method=\"{}\",status=\"{}\"}} {}\n",
                    key[0], key[1], key[2], count);
  page.head("http_request_duration_seconds", "histogram", "Time to the end of an answer.");
  for (const auto& [handler, h] : http_seconds_)
    h.write(page.text, "http_request_duration_seconds", fmt::format("handler=\"{}\"", handler));
  return std::move(page.text);
}

}  // namespace nanovllm::server
