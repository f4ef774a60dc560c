// The HTTP side of the server as endpoints see it. Boost.Beast and Asio stay in this folder.
//
// One thread, that of HttpServer::run(), reads, dispatches and writes. Handlers and every method of
// an Exchange run on it; other threads hand their results over by HttpServer::post().
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace nanovllm::server {

using Headers = std::vector<std::pair<std::string, std::string>>;

struct HttpRequest {
  std::string method;  ///< "POST"
  std::string path;    ///< as sent, without the query: nothing is decoded
  std::string query;
  Headers headers;  ///< names in lower case
  std::string body;
  size_t api_key = 0;  ///< which of the server's keys it brought
  /// Keeps the body's bytes counted among those in flight.
  std::shared_ptr<void> body_ticket;

  /// The first header of that (lower-case) name, or null.
  const std::string* header(std::string_view name) const;
};

/// Whether two names are one where ASCII letters have no case: hosts, media types, schemes.
bool is_same_name(std::string_view a, std::string_view b);

/// A part of a path as it was meant: "a%2Fb" is "a/b". A % without two digits stays.
std::string decode_percents(std::string_view text);

/// The path without slashes behind a slash or at the end: a client's base address often ends in
/// one.
std::string without_extra_slashes(std::string_view path);

struct HttpResponse {
  int status = 200;
  std::string body{};
  std::string content_type = "application/json";
  Headers headers{};
  bool close = false;  ///< the connection ends with this answer
};

/// One request and its answer: respond() once, or begin_stream(), write() and end_stream().
class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual void respond(HttpResponse response) = 0;
  /// Status 200 and server-sent events.
  virtual void begin_stream(const Headers& headers) = 0;
  /// Adds to the stream. All that is added before control goes back to the server leaves in one
  /// write. A client that does not read is cut off once more than HttpOptions::max_output_bytes
  /// wait for it.
  virtual void write(std::string_view bytes) = 0;
  virtual void end_stream() = 0;
  /// Called once if the client goes away, or is cut off, before the answer is complete; at once if
  /// it has gone already.
  virtual void on_abandoned(std::function<void()> callback) = 0;
};

/// Where and how to listen. Every limit that is hit costs its own connection one answer or its end.
struct HttpOptions {
  bool listens = true;  ///< false: requests come from this process alone (server::Embedding)
  std::string host = "127.0.0.1";
  int port = 8000;             ///< 0: any free one
  std::string uds{};           ///< a Unix socket's path, in place of host and port
  std::string ssl_certfile{};  ///< PEM; TLS where both are given
  std::string ssl_keyfile{};
  int64_t max_connections = 16384;
  size_t max_header_bytes = 16384;
  size_t max_target_bytes = 8192;
  size_t max_headers = 64;
  size_t max_body_bytes = size_t{32} << 20;
  size_t max_bodies_bytes = size_t{256} << 20;  ///< of all requests together
  size_t max_output_bytes = size_t{256} << 10;  ///< of a stream, waiting behind what is being sent
  double header_timeout = 10, body_timeout = 30, write_timeout = 30, idle_timeout = 75;
};

class HttpServer {
 public:
  using Handler = std::function<void(HttpRequest&&, std::shared_ptr<Exchange>)>;
  using Admission = std::function<bool(const HttpRequest& head)>;

  /// Listens. A body that `takes_body` does not want is not read: the handler gets the head alone,
  /// and the connection ends with its answer. Throws Error(invalid_argument) that names the
  /// address, or a certificate's file, and the reason.
  HttpServer(const HttpOptions& options, Handler handler, Admission takes_body = nullptr);
  ~HttpServer();

  /// Serves on the calling thread until stop().
  void run();
  /// Runs `task` on that thread; from any thread.
  void post(std::function<void()> task);
  /// Runs `task` on that thread every `period`, until it returns false.
  void every(std::chrono::milliseconds period, std::function<bool()> task);
  /// Runs `task` on that thread for each SIGINT and SIGTERM until stop().
  void on_signal(std::function<void(int)> task);

  /// Whether an answer that is complete takes its time to be sent; on that thread.
  bool is_sending_long() const;
  /// No new connections from now on, and those that are there end with their next answer; on that
  /// thread.
  void stop_accepting();
  /// Ends all connections and run(); on that thread.
  void stop();

  int port() const;
  /// "http://127.0.0.1:8000"
  std::string address() const;

  class State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace nanovllm::server
