// The engine, live: a stream of what its scheduler and its KV cache look like. Numbers alone, no
// request's id and no text.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "nanovllm/async_llm.h"

#include "server/http/http.h"

namespace nanovllm::server {

/// One update, as JSON. `blocks` are runs: a BlockState, how many, a BlockState, how many, ...; a
/// block table is runs of consecutive blocks: the first, how many, ... Of a cache of more than
/// 16,384 blocks the first ones are told, and block tables end where 20,000 runs have been told.
std::string live_json(const std::string& model, const EngineInfo& info,
                      const EngineSnapshot& snapshot);

/// Belongs to the I/O thread. The engine is asked for a snapshot ten times a second at most, and
/// only while somebody watches.
class Live {
 public:
  /// `http` and `llm` outlive this.
  Live(std::string model, HttpServer& http, AsyncLLM& llm);
  /// Begins a stream of server-sent events that ends when its client leaves; or returns what to
  /// answer instead.
  std::optional<HttpResponse> watch(const HttpRequest& request,
                                    const std::shared_ptr<Exchange>& exchange);

 private:
  using Clock = std::chrono::steady_clock;

  bool ask();
  void send(const EngineSnapshot& snapshot);

  const std::string model_;
  HttpServer& http_;
  AsyncLLM& llm_;
  std::unordered_map<int64_t, std::shared_ptr<Exchange>> watchers_;
  int64_t next_watcher_ = 0;
  bool is_ticking_ = false, is_asked_ = false;
  std::string last_;  // what was sent, and when: equal updates are left out for a second
  Clock::time_point sent_;
};

}  // namespace nanovllm::server
