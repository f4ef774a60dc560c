// The web page: the files of web/, gzipped and part of the program (cmake/Page.cmake).
#pragma once

#include <span>

#include "server/http/http.h"

namespace nanovllm::server {

struct PageFile {
  const char* path;  ///< as requests name it
  const char* content_type;
  const char* etag;  ///< with its quotes
  std::span<const unsigned char> gzip;
};

/// All of them.
std::span<const PageFile> page_files();

/// The answer to a request for one of them: the file, 304 where the client has it, or 406 where
/// it does not take gzip. The policy lets the page run and fetch what comes from this server, and
/// nothing else; it makes no markup from text.
HttpResponse page_response(const HttpRequest& request);

}  // namespace nanovllm::server
