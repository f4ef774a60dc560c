#include "server/http/message.h"

#include <algorithm>
#include <ctime>
#include <utility>

#include <boost/beast/http/status.hpp>
#include <fmt/chrono.h>
#include <fmt/format.h>

namespace nanovllm::server {
namespace http = boost::beast::http;

std::optional<HeadFault> fault_of(const http::request_header<>& head, bool chunked,
                                  const HttpOptions& options) {
  if (head.target().size() > options.max_target_bytes)
    return HeadFault{414, "the request's target is too long"};
  if (head.version() != 11 && head.version() != 10)
    return HeadFault{505, "HTTP/1.1 is spoken here"};
  if (static_cast<size_t>(std::distance(head.begin(), head.end())) > options.max_headers)
    return HeadFault{431, "the request has too many headers"};
  if (head.version() == 11 && head.count(http::field::host) != 1)
    return HeadFault{400, "the request needs one Host header"};
  const bool has_coding = head.count(http::field::transfer_encoding) > 0;
  if (has_coding && head.count(http::field::content_length) > 0)
    return HeadFault{400, "Content-Length and Transfer-Encoding exclude each other"};
  // Where chunked is not the last coding, nothing tells the body from a next request.
  if (has_coding && !boost::beast::iequals(head[http::field::transfer_encoding], "chunked"))
    return HeadFault{chunked ? 501 : 400, "Transfer-Encoding may be chunked only"};
  return std::nullopt;
}

HttpRequest request_of(http::request<http::string_body>&& message) {
  HttpRequest request;
  const auto text = [](auto view) { return std::string(view.data(), view.size()); };
  request.method = text(message.method_string());
  std::string target = text(message.target());
  // A proxy names the host in the target: that one counts, and not the header's (RFC 9112, 3.2.2).
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (!is_same_name(std::string_view(target).substr(0, scheme.size()), scheme)) continue;
    const size_t end = std::min(target.find_first_of("/?", scheme.size()), target.size());
    message.set(http::field::host, target.substr(scheme.size(), end - scheme.size()));
    target.erase(0, end);
    if (!target.starts_with('/')) target.insert(0, "/");
  }
  const size_t query = target.find('?');
  request.path = target.substr(0, query);
  if (query != std::string::npos) request.query = target.substr(query + 1);
  for (const auto& field : message) {
    std::string name = text(field.name_string());
    for (char& c : name)
      if (c >= 'A' && c <= 'Z') c = static_cast<char>(c + ('a' - 'A'));
    request.headers.emplace_back(std::move(name), text(field.value()));
  }
  request.body = std::move(message.body());
  return request;
}

std::string head_text(int status, std::string_view content_type, const Headers& headers,
                      bool close) {
  const auto reason = http::obsolete_reason(static_cast<http::status>(status));
  std::string text =
      fmt::format("HTTP/1.1 {} {}\r\nDate: {:%a, %d %b %Y %H:%M:%S} GMT\r\n", status,
                  std::string_view(reason.data(), reason.size()), fmt::gmtime(std::time(nullptr)));
  if (!content_type.empty()) text += fmt::format("Content-Type: {}\r\n", content_type);
  for (const auto& [name, value] : headers) text += fmt::format("{}: {}\r\n", name, value);
  text += close ? "Connection: close\r\n" : "Connection: keep-alive\r\n";
  return text;
}

std::string whole_head(const HttpResponse& response, bool close) {
  // The length of a 304 would be that of the answer which it stands for; a 204 may have none (RFC
  // 9110, 8.6).
  const bool has_length = response.status != 204 && response.status != 304;
  return head_text(response.status, response.content_type, response.headers, close) +
         (has_length ? fmt::format("Content-Length: {}\r\n\r\n", response.body.size()) : "\r\n");
}

}  // namespace nanovllm::server
