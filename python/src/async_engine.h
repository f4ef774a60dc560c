// The body of Python's AsyncLLM: nanovllm::AsyncLLM and, around the same engine, the server's
// endpoints without a socket.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>

#include "nanovllm/async_llm.h"

#include "convert.h"
#include "owner.h"
#include "port.h"
#include "server/server.h"

namespace nanovllm::python {

/// Python's hold on a port: a shared_ptr that the engine's thread drops must not need the GIL.
struct PortHandle {
  std::shared_ptr<Port> port = std::make_shared<Port>();
  std::unordered_set<int64_t> known_prompts{};  // of requests that have not ended
};

/// Its methods may be called from any thread.
class AsyncEngine {
 public:
  /// `service`: served_model_names, generation_config, max_num_queued_reqs, max_num_queued_tokens,
  /// request_timeout, version.
  AsyncEngine(const std::string& model, const nb::dict& options, const nb::dict& service);
  ~AsyncEngine();

  int64_t new_request_id();
  /// Begins a request; its outputs come to the port.
  void add_request(int64_t id, const PortHandle& to, nb::handle prompt, const std::string& params,
                   int kind, double timeout);
  void abort_request(int64_t id);
  /// Asks an endpoint; the answer comes to `port` in events of the id that is returned.
  int64_t ask(const PortHandle& to, const std::string& method, const std::string& path,
              const std::string& body);
  /// The answer is not waited for any longer.
  void abandon(int64_t id);

  void reset_prefix_cache();
  EngineStats stats();
  bool has_failed();
  int64_t num_live();
  /// Refuses new requests; false where those that run have not ended after `seconds`.
  bool drain(double seconds);
  /// Ends everything; every later call throws.
  void exit();
  /// Throws once it has been freed.
  Pinned pin();
  /// The news of a port: [(id, output or (status, content_type, body, is_last), is_last)]. A
  /// request's first output alone has the ids of its prompt.
  nb::list take(PortHandle& to);

 private:
  class Answer;

  void deliver(std::vector<RequestOutput>& outputs);
  /// Calls `use` with the engine, which stays meanwhile. Throws once it has been freed.
  template <class Use>
  auto with_server(Use&& use);

  Owner owner_;
  std::shared_mutex life_;  // shared by those that use server_, alone by exit()
  server::EmbeddedServer server_;
  std::thread thread_;
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<Port>> places_;   // of generate()
  std::unordered_map<int64_t, std::weak_ptr<Answer>> answers_;  // of openai(); the server's thread
  std::atomic<int64_t> next_answer_ = -1;                       // below 0: no id of the engine's
};

void bind_async_engine(nb::module_& m);

}  // namespace nanovllm::python
