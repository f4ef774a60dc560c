// State that connections share with the server that accepted them.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <unordered_set>

#include "server/http/http.h"

namespace nanovllm::server {

using Clock = std::chrono::steady_clock;

/// A connection as the server sees it: something with a deadline.
class ConnectionBase {
 public:
  virtual ~ConnectionBase() = default;
  /// Closes the connection at once.
  virtual void close() = 0;
  /// Ends what has waited too long.
  virtual void check_deadline(Clock::time_point now) = 0;
  /// Whether an answer that is complete takes its time to be sent.
  virtual bool is_sending_long() const = 0;
};

/// Belongs to the I/O thread, but for the bytes of bodies, which are given back wherever a request
/// is done with its body.
struct ConnectionContext {
  HttpOptions options;
  HttpServer::Handler handler;
  HttpServer::Admission takes_body;  // null: any
  std::shared_ptr<std::atomic<size_t>> body_bytes =
      std::make_shared<std::atomic<size_t>>(0);  // of all requests in flight
  std::unordered_set<ConnectionBase*> connections;
  int64_t num_refused = 0;  // of them, those that are one too many
  bool is_full = false;     // the next one is
  bool is_ending = false;   // no answer keeps its connection: clients are to find another server
};

}  // namespace nanovllm::server
