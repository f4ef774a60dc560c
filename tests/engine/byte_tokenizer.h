// A tokenizer whose tokens a test can count on.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "nanovllm/tokenizer.h"

namespace nanovllm {

/// Byte-level BPE without merges: id b is byte b. The ids from 256 on are `pieces` of two bytes and
/// more, so that a test chooses how text is cut into tokens.
class ByteTokenizer {
 public:
  explicit ByteTokenizer(const std::vector<std::string>& pieces) {
    std::string vocab;
    for (int byte = 0; byte < 256; ++byte)
      vocab += fmt::format("\"{}\": {}, ", visible(byte), byte);
    for (size_t i = 0; i < pieces.size(); ++i) {
      std::string spelled;
      for (const char byte : pieces[i]) spelled += visible(static_cast<unsigned char>(byte));
      vocab += fmt::format("\"{}\": {}, ", spelled, 256 + i);
    }
    vocab.resize(vocab.size() - 2);
    const std::string byte_level =
        "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": false, "
        "\"use_regex\": false}";
    tokenizer_ = std::make_shared<const Tokenizer>(Tokenizer::from_json(
        "{\"added_tokens\": [], \"normalizer\": null, \"pre_tokenizer\": " + byte_level +
        ", \"post_processor\": null, \"decoder\": " + byte_level +
        ", \"model\": {\"type\": \"BPE\", \"vocab\": {" + vocab + "}, \"merges\": []}}"));
  }
  const Tokenizer& operator*() const { return *tokenizer_; }
  std::shared_ptr<const Tokenizer> shared() const { return tokenizer_; }

 private:
  /// How GPT-2 spells a byte inside a JSON string.
  static std::string visible(int byte) {
    const auto printable = [](int b) {
      return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
    };
    int code = byte;
    if (!printable(byte)) {
      code = 256;
      for (int b = 0; b < byte; ++b) code += !printable(b);
    }
    return fmt::format("\\u{:04x}", code);
  }

  std::shared_ptr<const Tokenizer> tokenizer_;
};

}  // namespace nanovllm
