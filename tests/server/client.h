// A client that sends any bytes and reads HTTP answers; and a server in this process to send them
// to.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <nlohmann/json.hpp>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "io/json.h"
#include "server/server.h"

namespace nanovllm {

struct HttpAnswer {
  int status = 0;                              ///< 0: the connection ended without one
  std::map<std::string, std::string> headers;  ///< names in lower case
  std::string body;
  Json json() const { return Json::parse(body); }
  /// The JSON of a stream's events, "[DONE]" left out.
  std::vector<Json> events() const {
    std::vector<Json> list;
    for (size_t at = 0; (at = body.find("data: ", at)) != std::string::npos;) {
      const size_t end = body.find("\n\n", at);
      const std::string text = body.substr(at + 6, end - at - 6);
      if (text != "[DONE]") list.push_back(Json::parse(text));
      at = end;
    }
    return list;
  }
};

class Client {
 public:
  explicit Client(int port) : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = ::connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  }
  ~Client() { close(); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  bool connected() const { return connected_; }
  void close() {
    if (socket_ >= 0) ::close(socket_);
    socket_ = -1;
  }
  void send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n <= 0) return;
      bytes.remove_prefix(static_cast<size_t>(n));
    }
  }
  void end_input() { ::shutdown(socket_, SHUT_WR); }
  /// close() will end the connection by a reset.
  void reset_on_close() {
    const linger now{1, 0};
    ::setsockopt(socket_, SOL_SOCKET, SO_LINGER, &now, sizeof now);
  }
  /// The system keeps no more than about so many bytes that were not read.
  void limit_unread(int bytes) {
    ::setsockopt(socket_, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
  }
  /// No packet reaches this end any more, and none is acknowledged; false where that is forbidden.
  bool drop_packets() {
    sock_filter drop[] = {BPF_STMT(BPF_RET | BPF_K, 0)};
    const sock_fprog program{1, drop};
    return ::setsockopt(socket_, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program) == 0;
  }

  /// More bytes; false at the end of the connection, or after `seconds`.
  bool receive(double seconds = 120) {
    std::this_thread::sleep_for(pause);
    pollfd poll{socket_, POLLIN, 0};
    if (::poll(&poll, 1, static_cast<int>(seconds * 1000)) <= 0) return false;
    char bytes[16384];
    const ssize_t n = ::recv(socket_, bytes, sizeof bytes, 0);
    if (n > 0) buffer_.append(bytes, static_cast<size_t>(n));
    return n > 0;
  }
  /// Whether the server ends the connection, after what it still sends.
  bool ends() {
    while (receive()) continue;
    char byte;
    const ssize_t n = ::recv(socket_, &byte, 1, MSG_DONTWAIT);
    return n == 0 || (n < 0 && errno != EAGAIN);
  }
  std::chrono::milliseconds pause{0};  ///< before each receive()
  const std::string& received() const { return buffer_; }

  /// The next whole answer, interim ones skipped.
  HttpAnswer read_answer(bool has_body = true) {
    HttpAnswer answer;
    size_t head;
    while ((head = buffer_.find("\r\n\r\n")) == std::string::npos)
      if (!receive()) return answer;
    const std::string text = buffer_.substr(0, head + 2);
    buffer_.erase(0, head + 4);
    answer.status = std::atoi(text.c_str() + 9);
    if (answer.status == 100) return read_answer(has_body);
    for (size_t at = text.find("\r\n") + 2; at < text.size();) {
      const size_t end = text.find("\r\n", at), colon = text.find(':', at);
      std::string name = text.substr(at, colon - at);
      for (char& c : name) c = static_cast<char>(std::tolower(c));
      answer.headers[name] = text.substr(colon + 2, end - colon - 2);
      at = end + 2;
    }
    if (!has_body) return answer;
    if (answer.headers.count("transfer-encoding") > 0) {
      read_chunks(answer.body);
    } else {
      const size_t size = std::stoul(answer.headers["content-length"]);
      while (buffer_.size() < size)
        if (!receive()) return answer;
      answer.body = buffer_.substr(0, size);
      buffer_.erase(0, size);
    }
    return answer;
  }

 private:
  void read_chunks(std::string& body) {
    while (true) {
      size_t end;
      while ((end = buffer_.find("\r\n")) == std::string::npos)
        if (!receive()) return;
      const size_t size = std::stoul(buffer_, nullptr, 16);
      while (buffer_.size() < end + 2 + size + 2)
        if (!receive()) return;
      body += buffer_.substr(end + 2, size);
      buffer_.erase(0, end + 2 + size + 2);
      if (size == 0) return;
    }
  }

  int socket_;
  bool connected_ = false;
  std::string buffer_;
};

inline std::string repeated(const std::string& text, size_t times) {
  std::string out;
  out.reserve(text.size() * times);
  for (size_t i = 0; i < times; ++i) out += text;
  return out;
}

/// models/demo, served by a thread of this process.
class ServerOnThread {
 public:
  explicit ServerOnThread(server::ServerOptions options = {}) {
    if (options.model.empty()) options.model = std::string(NANOVLLM_SOURCE_DIR) + "/models/demo";
    if (options.served_model_names.empty()) options.served_model_names = {"demo"};
    options.http.port = 0;
    options.engine.device = "cpu";
    options.engine.num_threads = 1;
    options.version = "1.2.3";
    thread_ = std::thread([this, options] {
      server::ServerLog log;
      log.note = [this](const std::string& line) {
        const std::lock_guard lock(mutex_);
        notes_.push_back(line);
        if (line.starts_with("serving")) {
          port_ = std::stoi(line.substr(line.rfind(':') + 1));
          signals_before_ = signals_.load();
        }
        ready_.notify_all();
      };
      log.request = [this](const std::string& line) {
        const std::lock_guard lock(mutex_);
        requests_.push_back(line);
      };
      server::serve(options, log);
    });
    std::unique_lock lock(mutex_);
    ready_.wait_for(lock, std::chrono::minutes(5), [this] { return port_ > 0; });
    EXPECT_GT(port_, 0);
  }
  ~ServerOnThread() { stop(); }
  /// As SIGTERM does: every server of this process ends.
  void terminate() {
    ++signals_;
    ::kill(::getpid(), SIGTERM);
  }
  /// A server that is ending already gets no signal: once it has let go of its handler, one would
  /// end the test.
  void stop() {
    if (!thread_.joinable()) return;
    if (signals_ == signals_before_) terminate();
    thread_.join();
  }

  int port() const { return port_; }
  std::vector<std::string> notes() {
    const std::lock_guard lock(mutex_);
    return notes_;
  }
  std::vector<std::string> requests() {
    const std::lock_guard lock(mutex_);
    return requests_;
  }

  HttpAnswer get(const std::string& path, const std::string& headers = "") {
    return send("GET", path, "", headers);
  }
  HttpAnswer post(const std::string& path, const std::string& body,
                  const std::string& headers = "") {
    return send("POST", path, body, "Content-Type: application/json\r\n" + headers);
  }
  HttpAnswer post(const std::string& path, const Json& body) { return post(path, body.dump()); }

  static std::string request_text(const std::string& method, const std::string& path,
                                  const std::string& body, const std::string& headers = "") {
    return method + " " + path + " HTTP/1.1\r\nHost: localhost\r\n" + headers +
           "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
  }

 private:
  HttpAnswer send(const std::string& method, const std::string& path, const std::string& body,
                  const std::string& headers) {
    Client client(port_);
    client.send(request_text(method, path, body, headers));
    return client.read_answer();
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  int port_ = 0;
  std::vector<std::string> requests_, notes_;
  inline static std::atomic<int> signals_ = 0;
  std::atomic<int> signals_before_ = 0;
  std::thread thread_;
};

/// Timeouts are no test's but one's.
inline server::ServerOptions patient() {
  server::ServerOptions options;
  options.http.header_timeout = options.http.body_timeout = options.http.idle_timeout = 300;
  options.http.max_body_bytes = 100000;
  return options;
}

/// Whether `condition` comes true; a machine under load has its time.
template <class Condition>
bool eventually(const Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(2);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

/// Whether /metrics has a sample of this name, these labels and this value.
inline bool has_line(ServerOnThread& server, const std::string& name, const std::string& labels,
                     int value) {
  const std::string line =
      name + "{model_name=\"demo\",engine=\"0\"" + labels + "} " + std::to_string(value) + "\n";
  return server.get("/metrics").body.find(line) != std::string::npos;
}

/// `options` with a context that an answer takes minutes to fill on any machine.
inline server::ServerOptions with_endless(server::ServerOptions options = {}) {
  options.engine.max_model_len = 65536;
  options.engine.allow_long_max_model_len = true;
  options.engine.cpu_kvcache_bytes = int64_t{1} << 30;
  return options;
}

/// A chat that goes on to the end of the context, unless somebody ends it.
inline Json endless_chat(bool stream) {
  return {{"messages", Json::array({{{"role", "user"}, {"content", "Tell me a story."}}})},
          {"temperature", 0},
          {"ignore_eos", true},
          {"stream", stream}};
}

inline std::string request_bytes(const Json& body, const std::string& path = "/v1/chat/completions",
                                 const std::string& headers = "") {
  return ServerOnThread::request_text("POST", path, body.dump(),
                                      "Content-Type: application/json\r\n" + headers);
}

/// A greedy chat that asks the demo model for a sum.
inline Json chat_body(const std::string& question = "What is 37 + 45?") {
  return {{"model", "demo"},
          {"messages", Json::array({{{"role", "user"}, {"content", question}}})},
          {"temperature", 0}};
}

}  // namespace nanovllm
