// parse_json: any bytes give a value or an Error; a value survives being written and read again.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include <nlohmann/json.hpp>

#include "io/json.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace nanovllm;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const Json json = parse_json(text, "input", ErrorKind::invalid_argument);
    const std::string written = json.dump();
    if (parse_json(written, "written", ErrorKind::engine) != json) std::abort();
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::engine) std::abort();
    if (std::string_view(error.what()).find('\n') != std::string_view::npos) std::abort();
  }
  return 0;
}
