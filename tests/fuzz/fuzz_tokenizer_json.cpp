// Any bytes as tokenizer.json and, behind a NUL, tokenizer_config.json: refused with Error(model),
// or a tokenizer that works.
#include <algorithm>
#include <cstdint>
#include <string_view>

#include "nanovllm/error.h"
#include "nanovllm/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace nanovllm;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const size_t end = std::min(text.find('\0'), size);
  try {
    const auto tokenizer =
        Tokenizer::from_json(text.substr(0, end), text.substr(std::min(end + 1, size)));
    try {
      const auto ids = tokenizer.encode(" Hello <s>w\xC3\xB6rld 123\n\n\xF0\x9F\x98\x80 ab");
      tokenizer.decode(ids, false);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::invalid_argument) __builtin_trap();
    }
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::model) __builtin_trap();
  }
  return 0;
}
