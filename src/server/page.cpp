#include "server/page.h"

#include <algorithm>

#include "server/http/error_body.h"

namespace nanovllm::server {

HttpResponse page_response(const HttpRequest& request) {
  const auto files = page_files();
  const auto file = std::ranges::find(files, request.path, &PageFile::path);
  if (file == files.end()) return error_response(404, "the page has no such file");
  const auto* encodings = request.header("accept-encoding");
  if (!encodings || encodings->find("gzip") == std::string::npos)
    return error_response(
        406, "this file comes gzipped: send Accept-Encoding: gzip (curl --compressed)");
  HttpResponse response{
      .content_type = file->content_type,
      .headers = {
          {"Content-Security-Policy",
           "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
           "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
           "require-trusted-types-for 'script'; trusted-types 'none'"},
          {"X-Content-Type-Options", "nosniff"},
          {"Referrer-Policy", "no-referrer"},
          {"Cross-Origin-Opener-Policy", "same-origin"},
          {"Cross-Origin-Resource-Policy", "same-origin"},
          {"Cache-Control", "no-cache"},  // asked for each time, sent when it has changed
          {"Vary", "Accept-Encoding"},
          {"ETag", file->etag}}};
  const auto* known = request.header("if-none-match");
  if (known && known->find(file->etag) != std::string::npos) {
    response.status = 304;
    return response;
  }
  response.headers.emplace_back("Content-Encoding", "gzip");
  response.body.assign(file->gzip.begin(), file->gzip.end());
  return response;
}

}  // namespace nanovllm::server
