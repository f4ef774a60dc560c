// Access: API keys, the Host header on loopback, and browsers' origins.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/http/http.h"

namespace nanovllm::server {

struct ServerOptions;

/// Whether `host` is this machine and no other: "127.0.0.1", "localhost" or "::1".
bool is_loopback(std::string_view host);

class Access {
 public:
  explicit Access(const ServerOptions& options);

  /// The index of the key that the request brings, in either header; 0 where there are none.
  std::optional<size_t> key_of(const HttpRequest& request) const;
  /// Whether a server on loopback was asked under a name of this machine: a page of another site
  /// may reach its address under a name of its own (DNS rebinding), but has no key.
  bool has_local_host(const HttpRequest& request) const;
  bool allows_origins() const { return !origins_.empty(); }
  /// Adds the headers that let an allowed origin read the answer.
  void add_cors(const HttpRequest& request, Headers& headers) const;

 private:
  using Digest = std::array<unsigned char, 32>;
  static Digest digest(std::string_view text);
  std::optional<size_t> find_key(std::string_view given) const;

  std::vector<Digest> keys_;
  std::vector<std::string> origins_;
  bool checks_host_;
};

}  // namespace nanovllm::server
