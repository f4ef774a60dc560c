// JSON as we read it from files and users: bounded in size, depth and nodes, no duplicate keys,
// errors with a place. Who looks into a Json includes <nlohmann/json.hpp>, a second of compiling.
#pragma once

#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

#include "nanovllm/error.h"

namespace nanovllm {

/// Keeps the order of keys: the order matters to chat templates and to error messages.
/// Looking up a key, or adding one as Json::parse does, is linear: walk a large object instead.
using Json = nlohmann::ordered_json;

struct JsonLimits {
  size_t max_bytes = size_t{64} << 20;
  size_t max_depth = 64;
  size_t max_nodes = 4'000'000;
};

/// Parses `text`; `what` names it in errors ("config.json", "line 12"). Throws Error(kind) with the
/// byte offset. Refuses duplicate keys, NaN, comments, trailing text and invalid UTF-8.
Json parse_json(std::string_view text, std::string_view what, ErrorKind kind,
                const JsonLimits& limits = {});

/// Reads and parses a file; a missing file, a directory or an unreadable file is Error(model) with
/// the reason.
Json read_json_file(const std::string& path, const JsonLimits& limits = {});

/// On one line; bytes that are no UTF-8 become U+FFFD.
std::string dump_json(const Json& json);

/// The whole file as bytes. Throws Error(model): path and reason.
std::string read_file(const std::string& path, size_t max_bytes);

/// Appends `text`, which is UTF-8, as a JSON string with its quotes.
void append_json(std::string& out, std::string_view text);

/// `text` in quotes, shortened to 80 bytes, as printable ASCII on one line: any bytes may go into
/// an error message.
std::string quote(std::string_view text);

}  // namespace nanovllm
