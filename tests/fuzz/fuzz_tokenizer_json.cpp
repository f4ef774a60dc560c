// Any bytes as tokenizer.json: refused with Error(model), or a tokenizer that works.
#include <cstdint>

#include "nanovllm/error.h"
#include "nanovllm/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace nanovllm;
  try {
    const auto tokenizer = Tokenizer::from_json({reinterpret_cast<const char*>(data), size});
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
