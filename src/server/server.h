// The server: what `nanovllm serve` runs.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "nanovllm/async_llm.h"

#include "server/http/http.h"

namespace nanovllm::server {

struct ServerOptions {
  HttpOptions http;
  std::string model;
  EngineConfig engine;
  QueueLimits queue;
  std::vector<std::string> served_model_names;  ///< none: the model as it was given
  std::vector<std::string> api_keys;            ///< none: everybody is served
  std::vector<std::string> allowed_origins;     ///< of browsers' requests; "*": any
  std::string generation_config = "auto";       ///< or "vllm": the model's defaults are ignored
  double shutdown_timeout = 30;                 ///< seconds that streams have after SIGTERM
  double request_timeout = 0;                   ///< seconds that a request may take; 0: any
  double sse_keep_alive_interval = 15;          ///< seconds between comments on a stream; 0: none
  bool metrics_without_key = false;
  bool enable_prompt_tokens_details = false;
  bool enable_admin = false;  ///< /abort_requests and /reset_prefix_cache
  std::string version = "0";
};

/// Lines for the terminal and the log, without line ends.
struct ServerLog {
  std::function<void(const std::string&)> note;     ///< what the operator should know
  std::function<void(const std::string&)> request;  ///< one line for each request; never its text
};

/// Listens, loads the model and serves until SIGINT or SIGTERM, or until the engine fails. Throws
/// Error as the constructors of HttpServer and LLM do, and Error(engine) when the engine failed.
void serve(const ServerOptions& options, const ServerLog& log);

}  // namespace nanovllm::server
