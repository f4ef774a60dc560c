// The server: what `nanovllm serve` runs.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "nanovllm/async_llm.h"

#include "server/http/http.h"

namespace nanovllm::server {

/// The server's means for the program that it is a part of, once it serves. To be called from any
/// thread until `stop`.
struct EmbeddedServer {
  AsyncLLM* llm = nullptr;
  /// Answers a request as if it had come over a connection.
  std::function<void(HttpRequest&&, std::shared_ptr<Exchange>)> handle;
  std::function<void(std::function<void()>)> post;  ///< runs a task on the server's thread
  std::function<void()> stop;                       ///< ends serve()
};

/// For programs that hold the server (Python's AsyncLLM): they share its engine and its endpoints.
/// Signals are theirs, and serve() ends by `stop` alone, also when the engine has failed.
struct Embedding {
  /// Called on the server's thread. Empty: the server is a program of its own.
  std::function<void(const EmbeddedServer&)> on_ready{};
  /// Takes the outputs of the program's own requests out of a step's; from the engine's thread.
  std::function<void(std::vector<RequestOutput>&)> take{};
};

struct ServerOptions {
  HttpOptions http;
  Embedding embedding;
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
  double watchdog_timeout = 300;   ///< seconds in one step that make /health 503; 0: any
  int64_t max_reqs_per_key = 256;  ///< in work at once, where there are several keys
  std::string chat_template, chat_template_place;  ///< in place of the model's; empty: none
  bool trust_request_chat_template = false;        ///< requests may bring their own
  std::string root_path;                           ///< where a proxy shows the server: "/llm"
  std::vector<std::string> unlogged_paths;         ///< without a line in the log
  bool metrics_without_key = false;
  bool enable_prompt_tokens_details = false;
  bool force_include_usage = false;                ///< in each chunk, and at the stream's end
  std::string chat_template_kwargs = "{}";         ///< of requests that do not say otherwise
  std::string tool_call_parser, reasoning_parser;  ///< empty: by the chat template; "none"
  bool no_enforce_auto_tool_arguments = false;     ///< calls with tool_choice auto may be invalid
  bool reasoning_content = false;                  ///< reasoning under its older name
  bool json_log = false;                           ///< requests are logged as JSON
  bool stays_after_failure = false;                ///< a failed engine does not end the server
  bool no_page = false;                            ///< without the web page at /
  bool enable_tokenizer_info = false;              ///< /tokenizer_info
  bool enable_admin = false;                       ///< /abort_requests and /reset_prefix_cache
  std::string version = "0", commit{};
  /// Called where the engine hangs when the server ends; does not return. Empty: the end is
  /// awaited.
  std::function<void(const std::string& why)> give_up{};
};

/// Lines for the terminal and the log, without line ends.
struct ServerLog {
  std::function<void(const std::string&)> note;     ///< what the operator should know
  std::function<void(const std::string&)> request;  ///< one line for each request; never its text
};

/// Listens, loads the model and serves until SIGINT or SIGTERM, or until the engine fails (with
/// `stays_after_failure` it then answers 503 until a signal). Throws
/// Error as the constructors of HttpServer and LLM do, and Error(engine) when the engine failed.
void serve(const ServerOptions& options, const ServerLog& log);

}  // namespace nanovllm::server
