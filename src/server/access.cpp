#include "server/access.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include "server/server.h"

namespace nanovllm::server {

Access::Access(const ServerOptions& options) : origins_(options.allowed_origins) {
  for (const std::string& key : options.api_keys) keys_.push_back(digest(key));
  const std::string& host = options.http.host;
  checks_host_ =
      options.http.uds.empty() && (host == "127.0.0.1" || host == "localhost" || host == "::1");
}

// All digests have one length: comparing takes the same time for every key.
Access::Digest Access::digest(std::string_view text) {
  Digest out{};
  static_assert(sizeof out == SHA256_DIGEST_LENGTH);
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), out.data());
  return out;
}

bool Access::has_key(const HttpRequest& request) const {
  if (keys_.empty()) return true;
  std::string_view given;
  int times = 0;
  for (const auto& [name, value] : request.headers) {
    if (name == "authorization" && value.starts_with("Bearer ")) given = value, ++times;
    if (name == "x-api-key") given = value, ++times;
  }
  if (given.starts_with("Bearer ")) given.remove_prefix(7);
  const auto hashed = digest(given);
  bool known = false;
  for (const auto& key : keys_)
    known |= CRYPTO_memcmp(key.data(), hashed.data(), hashed.size()) == 0;
  return known && times == 1;
}

bool Access::has_local_host(const HttpRequest& request) const {
  if (!checks_host_) return true;
  const auto* given = request.header("host");
  if (!given) return true;
  std::string name = *given;
  if (name.starts_with('[')) {
    name = name.substr(1, name.find(']') - 1);
  } else {
    name = name.substr(0, name.find(':'));
  }
  return name == "127.0.0.1" || name == "localhost" || name == "::1";
}

void Access::add_cors(const HttpRequest& request, Headers& headers) const {
  const auto* origin = request.header("origin");
  if (!origin) return;
  for (const std::string& allowed : origins_) {
    if (allowed != "*" && allowed != *origin) continue;
    headers.emplace_back("Access-Control-Allow-Origin", allowed);
    headers.emplace_back("Access-Control-Allow-Methods", "GET, POST, OPTIONS");
    headers.emplace_back("Access-Control-Allow-Headers",
                         "Authorization, Content-Type, X-Api-Key, X-Request-Id");
    return;
  }
}

}  // namespace nanovllm::server
