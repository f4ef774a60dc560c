// /openapi.json: the endpoints and their fields, for people, generators of clients and of tests.
#pragma once

#include <string>
#include <vector>

#include "io/json.h"

namespace nanovllm::server {

struct Operation {
  std::string method, path;
  bool is_open = false;  ///< needs no key
};

/// An OpenAPI 3.0 document of these operations, which a proxy shows under `root_path`.
Json openapi(const std::vector<Operation>& operations, const std::string& version,
             const std::string& root_path = {});

}  // namespace nanovllm::server
