// HTTP messages as this server reads and writes them.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include <boost/beast/http/message.hpp>
#include <boost/beast/http/string_body.hpp>

#include "server/http/http.h"

namespace nanovllm::server {

/// The status of the refusal, and its text, which lives as long as the program.
struct HeadFault {
  int status;
  std::string_view message;
};
/// The first fault of a request's head, or nothing. `chunked`: the last of its transfer codings is
/// chunked.
std::optional<HeadFault> fault_of(const boost::beast::http::request_header<>& head, bool chunked,
                                  const HttpOptions& options);

/// A parsed message as handlers see it, without the ticket of its body.
HttpRequest request_of(boost::beast::http::request<boost::beast::http::string_body>&& message);

/// The head of an answer, without the empty line that ends it.
std::string head_text(int status, std::string_view content_type, const Headers& headers,
                      bool close);
/// The head of an answer that is sent in one piece, with that line.
std::string whole_head(const HttpResponse& response, bool close);

}  // namespace nanovllm::server
