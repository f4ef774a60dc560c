// Who may ask: API keys, the Host header on loopback, and browsers' origins.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "server/http/http.h"

namespace nanovllm::server {

struct ServerOptions;

class Access {
 public:
  explicit Access(const ServerOptions& options);

  /// Whether the request brings one of the keys, in one header; true where there are none.
  bool has_key(const HttpRequest& request) const;
  /// Whether a server on loopback was asked under a name of this machine: a page of another site
  /// may reach its address under a name of its own (DNS rebinding).
  bool has_local_host(const HttpRequest& request) const;
  bool allows_origins() const { return !origins_.empty(); }
  /// What lets an allowed origin read the answer.
  void add_cors(const HttpRequest& request, Headers& headers) const;

 private:
  using Digest = std::array<unsigned char, 32>;
  static Digest digest(std::string_view text);

  std::vector<Digest> keys_;
  std::vector<std::string> origins_;
  bool checks_host_;
};

}  // namespace nanovllm::server
