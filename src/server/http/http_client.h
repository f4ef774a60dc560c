// One GET at a time, for `nanovllm top`.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "server/http/http.h"

namespace nanovllm::server {

struct Url {
  bool is_tls = false;
  std::string host;
  std::string port;
  std::string prefix;  ///< of every path, without a slash at its end

  /// "http://" or "https://", a host, perhaps a port and a path; "localhost:8000" is HTTP. Throws
  /// Error(invalid_argument).
  explicit Url(std::string_view text);
};

struct GetOptions {
  Headers headers{};
  double timeout = 5;  ///< seconds for all of it
  size_t max_bytes = size_t{16} << 20;
  /// The answer is complete once its body has this; empty: at its end.
  std::string until{};
  /// Asked ten times a second: true gives it up.
  std::function<bool()> is_cancelled{};
};

/// The answer, whatever its status. A certificate is checked against the system's, or those that
/// SSL_CERT_FILE names. Throws Error(unavailable) that names the server and the reason, and
/// Error(invalid_argument) for a host that is not known.
HttpResponse http_get(const Url& url, const std::string& path, const GetOptions& options);

}  // namespace nanovllm::server
