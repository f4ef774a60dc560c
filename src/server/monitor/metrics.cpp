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

void head(std::string& out, std::string_view name, std::string_view type, std::string_view help) {
  out += fmt::format("# HELP {} {}\n# TYPE {} {}\n", name, help, name, type);
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

std::string Metrics::page(const std::string& model, const EngineStats& s, const EngineInfo& info,
                          double step_age) const {
  std::string out;
  std::string name;  // as Prometheus' text format escapes a label's value
  for (const char c : model) {
    if (c == '"' || c == '\\' || c == '\n') name += '\\';
    name += c == '\n' ? 'n' : c;
  }
  const std::string labels = fmt::format("model_name=\"{}\",engine=\"0\"", name);
  const auto value = [&](std::string_view metric, std::string_view type, std::string_view help,
                         double v, const std::string& more = "") {
    head(out, metric, type, help);
    out += fmt::format("{}{{{}{}}} {}\n", metric, labels, more, v);
  };
  const auto gauge = [&](std::string_view metric, std::string_view help, double v) {
    value(metric, "gauge", help, v);
  };
  const auto counter = [&](std::string_view metric, std::string_view help, int64_t v) {
    value(fmt::format("{}_total", metric), "counter", help, static_cast<double>(v));
  };
  gauge("vllm:num_requests_running", "Sequences running.", static_cast<double>(s.running));
  gauge("vllm:num_requests_waiting", "Sequences waiting.", static_cast<double>(s.waiting));
  head(out, "vllm:num_requests_waiting_by_reason", "gauge", "Sequences waiting, by reason.");
  out += fmt::format(
      "vllm:num_requests_waiting_by_reason{{{0},reason=\"capacity\"}} {1}\n"
      "vllm:num_requests_waiting_by_reason{{{0},reason=\"deferred\"}} 0\n",
      labels, s.waiting);
  const double usage = info.num_blocks > 0 ? 1 - static_cast<double>(s.free_blocks) /
                                                     static_cast<double>(info.num_blocks)
                                           : 0;
  gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", usage);
  head(out, "vllm:cache_config_info", "gauge", "The cache's configuration.");
  out += fmt::format(
      "vllm:cache_config_info{{{},block_size=\"{}\",cache_dtype=\"{}\",num_gpu_blocks=\"{}\"}} 1\n",
      labels, info.block_size, info.kv_cache_dtype, info.num_blocks);
  counter("vllm:num_preemptions", "Sequences preempted.", s.preemptions);
  counter("vllm:prompt_tokens", "Prompt tokens.", s.prompt_tokens);
  counter("vllm:prompt_tokens_cached", "Prompt tokens from the prefix cache.",
          s.cached_prompt_tokens);
  counter("vllm:generation_tokens", "Tokens generated.", s.generated_tokens);
  counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.",
          s.prompt_tokens);
  counter("vllm:prefix_cache_hits", "Prompt tokens found there.", s.cached_prompt_tokens);
  counter("vllm:corrupted_requests", "Requests whose logits were not finite.", failed_numbers_);
  head(out, "vllm:request_success_total", "counter", "Answers, by the reason of their end.");
  for (const char* reason : {"stop", "length", "abort", "error"}) {
    const auto found = finished_.find(reason);
    out += fmt::format("vllm:request_success_total{{{},finished_reason=\"{}\"}} {}\n", labels,
                       reason, found == finished_.end() ? 0 : found->second);
  }
  head(out, "vllm:admission_rejections_total", "counter", "Requests refused for a queue limit.");
  out += fmt::format(
      "vllm:admission_rejections_total{{{0},reason=\"max_num_queued_reqs\"}} {1}\n"
      "vllm:admission_rejections_total{{{0},reason=\"max_num_queued_tokens\"}} {2}\n",
      labels, rejected_reqs_, rejected_tokens_);
  const auto histogram = [&](std::string_view metric, std::string_view help, const Histogram& h) {
    head(out, metric, "histogram", help);
    h.write(out, metric, labels);
  };
  head(out, "nanovllm:engine_step_age_seconds", "gauge", "Time since the present step began.");
  out += fmt::format("nanovllm:engine_step_age_seconds{{{}}} {:.3f}\n", labels, step_age);
  histogram("vllm:time_to_first_token_seconds", "Time to the first token.", first_token_);
  histogram("vllm:inter_token_latency_seconds", "Time between two tokens of an answer.", gap_);
  histogram("vllm:iteration_tokens_total", "Prompt and generated tokens of a step.", step_tokens_);
  histogram("vllm:request_time_per_output_token_seconds", "Time per token after the first.",
            per_token_);
  histogram("vllm:e2e_request_latency_seconds", "Time of a request.", whole_);
  histogram("vllm:request_queue_time_seconds", "Time until first scheduled.", queue_);
  histogram("vllm:request_inference_time_seconds", "Time after that.", inference_);
  histogram("vllm:request_prefill_time_seconds", "From scheduled to the first token.", prefill_);
  histogram("vllm:request_decode_time_seconds", "From the first token to the last.", decode_);
  histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", prompt_tokens_);
  histogram("vllm:request_generation_tokens", "Tokens generated for a request.",
            generation_tokens_);
  histogram("vllm:request_max_num_generation_tokens", "Tokens that a request may generate.",
            max_tokens_);
  histogram("vllm:request_params_max_tokens", "max_tokens of a request.", max_tokens_);
  histogram("vllm:request_params_n", "n of a request.", params_n_);
  head(out, "http_requests_total", "counter", "HTTP requests.");
  for (const auto& [key, count] : http_requests_)
    out += fmt::format("http_requests_total{{handler=\"{}\",method=\"{}\",status=\"{}\"}} {}\n",
                       key[0], key[1], key[2], count);
  head(out, "http_request_duration_seconds", "histogram", "Time to the end of an answer.");
  for (const auto& [handler, h] : http_seconds_)
    h.write(out, "http_request_duration_seconds", fmt::format("handler=\"{}\"", handler));
  return out;
}

}  // namespace nanovllm::server
