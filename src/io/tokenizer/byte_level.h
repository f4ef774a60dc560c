// GPT-2's byte alphabet: each byte has a printable character of its own, so that tokenizer.json can
// spell any bytes.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace nanovllm {

class ByteAlphabet {
 public:
  ByteAlphabet();
  char32_t character(unsigned char byte) const { return characters_[byte]; }
  /// The characters of `bytes`, as UTF-8.
  std::string spell(std::string_view bytes) const;
  /// The bytes that `spelled` stands for; nothing where a character is outside the alphabet.
  std::optional<std::string> bytes_of(std::string_view spelled) const;

 private:
  static constexpr size_t kEnd = 0x144;  // one more than the largest character of the alphabet
  std::array<char32_t, 256> characters_{};
  std::array<int16_t, kEnd> bytes_{};  // -1 where there is none
};

}  // namespace nanovllm
