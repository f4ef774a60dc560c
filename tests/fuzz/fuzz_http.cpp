// Any bytes on a connection, in pieces: the server answers each request that it takes once, with a
// whole answer, closes what is none, and lives. The first byte says how the rest is cut.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "server/http/http.h"

namespace {

using namespace nanovllm::server;

/// One server for all inputs, on a thread of its own, over a Unix socket.
class EchoServer {
 public:
  EchoServer() {
    HttpOptions options;
    options.uds = path_;
    options.max_header_bytes = 1024;
    options.max_body_bytes = 4096;
    options.max_headers = 8;
    options.header_timeout = options.body_timeout = options.idle_timeout = 2;
    server_ = std::make_unique<HttpServer>(
        options, [this](HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
          ++requests;
          if (request.query == "stream") {
            exchange->begin_stream({});
            exchange->write("data: " + std::to_string(request.body.size()) + "\n\n");
            return exchange->end_stream();
          }
          exchange->respond({.body = std::to_string(request.body.size())});
        });
    std::thread([this] { server_->run(); }).detach();
  }
  const std::string& path() const { return path_; }
  std::atomic<int> requests = 0;

 private:
  std::string path_ = "/tmp/fuzz_http." + std::to_string(::getpid());
  std::unique_ptr<HttpServer> server_;
};

int connect_to(const std::string& path) {
  const int client = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size());
  if (::connect(client, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) std::abort();
  return client;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static EchoServer& server = *new EchoServer;  // its thread outlives main()
  if (size < 2 || size > 16384) return 0;
  const size_t step = data[0] == 0 ? size : data[0] * size_t{8};
  const int before = server.requests;
  const int client = connect_to(server.path());
  for (size_t at = 1; at < size; at += step)
    if (::send(client, data + at, std::min(step, size - at), MSG_NOSIGNAL) < 0) break;
  ::shutdown(client, SHUT_WR);
  std::string received;
  char bytes[4096];
  for (ssize_t n; (n = ::recv(client, bytes, sizeof bytes, 0)) > 0;)
    received.append(bytes, static_cast<size_t>(n));
  ::close(client);
  // Each answer begins with a status line; no byte comes before the first.
  if (!received.empty() && !received.starts_with("HTTP/1.1 ")) std::abort();
  int whole = 0;
  for (size_t at = 0; (at = received.find("HTTP/1.1 200 OK\r\n", at)) != received.npos; ++at)
    ++whole;
  if (whole > server.requests - before) std::abort();
  return 0;
}
