#include "server/access.h"

#include <algorithm>

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include "server/server.h"

namespace nanovllm::server {

bool is_loopback(std::string_view host) {
  return host == "127.0.0.1" || is_same_name(host, "localhost") || host == "::1";
}

Access::Access(const ServerOptions& options) : origins_(options.allowed_origins) {
  for (const std::string& key : options.api_keys) keys_.push_back(digest(key));
  checks_host_ = options.http.uds.empty() && is_loopback(options.http.host) && keys_.empty();
}

// All digests have one length: comparing takes the same time for every key.
Access::Digest Access::digest(std::string_view text) {
  Digest out{};
  static_assert(sizeof out == SHA256_DIGEST_LENGTH);
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), out.data());
  return out;
}

std::optional<size_t> Access::find_key(std::string_view given) const {
  const auto hashed = digest(given);
  std::optional<size_t> known;
  for (size_t i = keys_.size(); i-- > 0;)
    if (CRYPTO_memcmp(keys_[i].data(), hashed.data(), hashed.size()) == 0) known = i;
  return known;
}

// A client that has a key and a token may send both, and one is another server's.
std::optional<size_t> Access::key_of(const HttpRequest& request) const {
  if (keys_.empty()) return 0;
  const auto given_by = [&](std::string_view header, bool needs_scheme) -> std::optional<size_t> {
    const auto is_it = [&](const auto& field) { return field.first == header; };
    if (std::ranges::count_if(request.headers, is_it) != 1) return std::nullopt;
    constexpr std::string_view kScheme = "Bearer ";
    std::string_view value = *request.header(header);
    const bool has_scheme = is_same_name(value.substr(0, kScheme.size()), kScheme);
    if (has_scheme) value.remove_prefix(kScheme.size());
    return has_scheme || !needs_scheme ? find_key(value) : std::nullopt;
  };
  const auto bearer = given_by("authorization", true);
  return bearer ? bearer : given_by("x-api-key", false);
}

bool Access::has_local_host(const HttpRequest& request) const {
  if (!checks_host_) return true;
  const auto* given = request.header("host");
  if (!given) return true;
  std::string_view name = *given;
  name =
      name.starts_with('[') ? name.substr(1, name.find(']') - 1) : name.substr(0, name.find(':'));
  return is_loopback(name) || name == "0.0.0.0";
}

void Access::add_cors(const HttpRequest& request, Headers& headers) const {
  const auto* origin = request.header("origin");
  if (!origin) return;
  for (const std::string& allowed : origins_) {
    if (allowed != "*" && allowed != *origin) continue;
    headers.emplace_back("Access-Control-Allow-Origin", allowed);
    if (allowed != "*") headers.emplace_back("Vary", "Origin");
    headers.emplace_back("Access-Control-Allow-Methods", "GET, POST, OPTIONS");
    headers.emplace_back("Access-Control-Expose-Headers", "X-Request-Id, Retry-After");
    // Clients bring headers of their own (X-Stainless-Os, Anthropic-Version): whichever they ask
    // for, the origin is what decides.
    if (const auto* asked = request.header("access-control-request-headers"))
      headers.emplace_back("Access-Control-Allow-Headers", *asked);
    return;
  }
}

}  // namespace nanovllm::server
