// Any bytes as a prompt, and as ids to decode, for tokenizers of every kind.
#include <cstdint>
#include <string>
#include <vector>

#include "nanovllm/error.h"
#include "nanovllm/tokenizer.h"

#include "io/utf8.h"

namespace {

using namespace nanovllm;

constexpr const char* kNames[] = {"gpt2",  "llama3",    "qwen2", "deepseek",
                                  "llama", "metaspace", "added", "normalizers"};

const std::vector<Tokenizer>& tokenizers() {
  static const std::vector<Tokenizer> all = [] {
    std::vector<Tokenizer> result;
    for (const char* name : kNames)
      result.emplace_back(std::string(NANOVLLM_SOURCE_DIR "/tests/data/tokenizers/") + name);
    return result;
  }();
  return all;
}

void require(bool condition) {
  if (!condition) __builtin_trap();
}

/// Streamed pieces add up to the text that is decoded at once, and is valid UTF-8 at every step.
void check_decoding(const Tokenizer& tokenizer, const std::vector<int32_t>& ids, bool skip) {
  IncrementalDetokenizer stream(tokenizer, skip);
  std::string text;
  for (const int32_t id : ids) {
    const std::string piece = stream.add(id);
    require(find_invalid_utf8(piece) == std::string::npos);
    text += piece;
  }
  require(text + stream.flush() == tokenizer.decode(ids, skip));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const auto& tokenizer = tokenizers()[data[0] % std::size(kNames)];
  const bool flag = data[0] & 0x80;
  ++data;
  --size;
  std::vector<int32_t> any_ids(size / 2);
  for (size_t i = 0; i < any_ids.size(); ++i)
    any_ids[i] =
        (data[2 * i] | data[2 * i + 1] << 8) % (static_cast<int32_t>(tokenizer.vocab_size()) + 3) -
        1;
  check_decoding(tokenizer, any_ids, flag);
  try {
    const auto ids = tokenizer.encode({reinterpret_cast<const char*>(data), size}, true, flag);
    for (const int32_t id : ids) require(id >= 0 && id < tokenizer.vocab_size());
    check_decoding(tokenizer, ids, flag);
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::invalid_argument);
  }
  return 0;
}
