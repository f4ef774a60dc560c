// The requests that generate: from a body to the engine, and from its outputs to the clients.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "nanovllm/async_llm.h"

#include "server/generation.h"
#include "server/http/http.h"
#include "server/monitor/metrics.h"
#include "server/pool.h"
#include "server/server.h"

namespace nanovllm::server {

/// Belongs to the I/O thread, but for what read(), prepare() and answer_whole() do on the pools.
class Generations {
 public:
  /// Sends a whole answer.
  using Answer =
      std::function<void(const HttpRequest&, const std::shared_ptr<Exchange>&, HttpResponse)>;

  /// All of them outlive this.
  Generations(const ServerOptions& options, const RequestDefaults& defaults, HttpServer& http,
              AsyncLLM& llm, Pool& pool, Pool& grammars, Metrics& metrics, Answer answer,
              const ServerLog& log);

  /// Answers a request to an endpoint that generates; `headers` go with the answer.
  void add(HttpRequest&& request, std::shared_ptr<Exchange> exchange, Headers headers);
  /// The engine's outputs of one step.
  void deliver(std::vector<RequestOutput>& outputs);
  void keep_alive();
  /// Ends the requests whose answers have the ids that a body's request_ids names, as in vLLM: all
  /// of them if it names none. Gives the answer to that body.
  HttpResponse abort(const std::string& body);
  /// Ends them with an error.
  void fail_all(const std::string& message);
  /// Requests that have no answer yet, those that are being read among them.
  int64_t size() const {
    return std::accumulate(in_work_.begin(), in_work_.end(), int64_t{0},
                           [](int64_t sum, const auto& of_key) { return sum + of_key.second; });
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Job {
    HttpRequest request;
    std::shared_ptr<Exchange> exchange;
    const GenerationEndpoint* endpoint = nullptr;
    Headers headers;
    Clock::time_point begin = Clock::now();
    std::string id;
  };

  struct Place {
    std::shared_ptr<Generation> generation;
    size_t prompt = 0;
  };

  void read(std::shared_ptr<Job> job);
  void prepare(std::shared_ptr<Job> job, GenerationRequest&& request, const Json& body);
  void refuse(std::shared_ptr<Job>&& job, HttpResponse response);
  void answer_refused(const Job& job, HttpResponse response);
  void start(std::shared_ptr<Job>&& job, GenerationRequest&& request,
             std::vector<std::vector<int32_t>>&& prompts, const Json& body);
  void enlist(std::shared_ptr<Job> job, std::shared_ptr<Generation> generation,
              const SamplingParams& params);
  void answer_whole(std::shared_ptr<Generation> generation);
  void end(int64_t id, int status, const std::string& message, const std::string& param = {});
  void forget(const Generation& generation);
  void note_ignored(const std::vector<std::string>& fields);
  void log(const Job& job, int status, const GenerationSummary& summary);

  const ServerOptions& options_;
  const RequestDefaults& defaults_;
  HttpServer& http_;
  AsyncLLM& llm_;
  Pool& pool_;
  Pool& grammars_;  // of requests whose grammars may take seconds
  Metrics& metrics_;
  const Answer answer_;
  const ServerLog& log_;
  const AnswerOptions answer_options_;
  std::unordered_map<size_t, int64_t> in_work_;             // requests, by their API key
  std::set<std::string> noted_fields_;                      // that were ignored and told of
  std::unordered_map<int64_t, Place> places_;               // by the engine's ids
  std::unordered_map<int64_t, std::shared_ptr<Job>> jobs_;  // by a generation's first id
};

}  // namespace nanovllm::server
