#include "server/http/http_client.h"

#include <boost/asio.hpp>
#include <boost/asio/ssl.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/empty_body.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <boost/beast/http/write.hpp>
#include <fmt/format.h>

#include "core/check.h"
#include "core/seconds.h"
#include "io/json.h"

namespace nanovllm::server {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using asio::ip::tcp;
using boost::system::error_code;
using Clock = std::chrono::steady_clock;

class Call {
 public:
  Call(const Url& url, const GetOptions& options) : url_(url), options_(options) {}

  HttpResponse get(const std::string& path) {
    tcp::resolver resolver(io_);
    tcp::resolver::results_type found;
    await([&](auto done) {
      resolver.async_resolve(url_.host, url_.port, [&found, done](error_code error, auto results) {
        found = results;
        done(error);
      });
    });
    tcp::socket socket(io_);
    await([&](auto done) {
      asio::async_connect(socket, found, [done](error_code error, auto) { done(error); });
    });
    if (!url_.is_tls) return exchange(socket, path);
    asio::ssl::context tls(asio::ssl::context::tls_client);
    tls.set_default_verify_paths();
    asio::ssl::stream<tcp::socket> stream(std::move(socket), tls);
    stream.set_verify_mode(asio::ssl::verify_peer);
    stream.set_verify_callback(asio::ssl::host_name_verification(url_.host));
    SSL_set_tlsext_host_name(stream.native_handle(), url_.host.c_str());
    await([&](auto done) { stream.async_handshake(asio::ssl::stream_base::client, done); });
    return exchange(stream, path);
  }

 private:
  template <class Stream>
  HttpResponse exchange(Stream& stream, const std::string& path) {
    http::request<http::empty_body> request(http::verb::get, url_.prefix + path, 11);
    const bool is_v6 = url_.host.find(':') != std::string::npos;
    request.set(http::field::host, is_v6 ? fmt::format("[{}]:{}", url_.host, url_.port)
                                         : fmt::format("{}:{}", url_.host, url_.port));
    request.set(http::field::connection, "close");
    for (const auto& [name, value] : options_.headers) request.set(name, value);
    await([&](auto done) {
      http::async_write(stream, request, [done](error_code error, size_t) { done(error); });
    });
    boost::beast::flat_buffer buffer;
    http::response_parser<http::string_body> parser;
    parser.body_limit(options_.max_bytes);
    const auto is_complete = [&] {
      return parser.is_done() || (!options_.until.empty() && parser.is_header_done() &&
                                  parser.get().body().find(options_.until) != std::string::npos);
    };
    while (!is_complete())
      await([&](auto done) {
        http::async_read_some(stream, buffer, parser,
                              [done](error_code error, size_t) { done(error); });
      });
    HttpResponse response{.status = static_cast<int>(parser.get().result_int())};
    response.body = std::move(parser.get().body());
    return response;
  }

  /// Runs one operation, which calls what it is given with its error, to its end.
  template <class Start>
  void await(const Start& start) {
    bool is_done = false;
    error_code result;
    start([&](error_code error) {
      is_done = true;
      result = error;
    });
    io_.restart();
    while (!is_done) {
      io_.run_one_for(std::chrono::milliseconds(100));
      if (is_done) break;
      check(!options_.is_cancelled || !options_.is_cancelled(), ErrorKind::unavailable,
            "interrupted");
      check(seconds_since(begin_) < options_.timeout, ErrorKind::unavailable,
            "{}:{} does not answer within {} s", url_.host, url_.port, options_.timeout);
      if (io_.stopped()) io_.restart();
    }
    check(!result, ErrorKind::unavailable, "{}:{} cannot be asked: {}", url_.host, url_.port,
          result.message());
  }

  const Url& url_;
  const GetOptions& options_;
  const Clock::time_point begin_ = Clock::now();
  asio::io_context io_{1};
};

}  // namespace

Url::Url(std::string_view text) {
  const std::string_view given = text;
  const auto refuse = [&](bool is_good) {
    check(is_good, ErrorKind::invalid_argument, "{} is no URL of a server: give http://HOST:PORT",
          quote(given));
  };
  is_tls = text.starts_with("https://");
  if (const size_t scheme = text.find("://"); scheme != text.npos) {
    refuse(is_tls || text.starts_with("http://"));
    text.remove_prefix(scheme + 3);
  }
  const size_t slash = std::min(text.find('/'), text.size());
  prefix = text.substr(slash);
  while (prefix.ends_with('/')) prefix.pop_back();
  std::string_view authority = text.substr(0, slash);
  if (authority.starts_with('[')) {
    const size_t end = authority.find(']');
    refuse(end != authority.npos);
    host = authority.substr(1, end - 1);
    authority.remove_prefix(end + 1);
  } else {
    host = authority.substr(0, authority.find(':'));
    authority.remove_prefix(host.size());
  }
  if (authority.starts_with(':')) port = authority.substr(1);
  const auto is_plain = [](std::string_view part, std::string_view more) {
    return std::ranges::all_of(
        part, [&](char c) { return (c > ' ' && c < 0x7f && more.find(c) == more.npos); });
  };
  refuse(!host.empty() && is_plain(host, "@?#\"") && is_plain(prefix, "?#\"") &&
         (port.empty() ? authority.empty()
                       : port.find_first_not_of("0123456789") == port.npos && port.size() < 6));
  if (port.empty()) port = is_tls ? "443" : "80";
}

HttpResponse http_get(const Url& url, const std::string& path, const GetOptions& options) {
  return Call(url, options).get(path);
}

}  // namespace nanovllm::server
