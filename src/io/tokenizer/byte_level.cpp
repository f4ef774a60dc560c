#include "io/tokenizer/byte_level.h"

#include "io/utf8.h"

namespace nanovllm {

ByteAlphabet::ByteAlphabet() {
  bytes_.fill(-1);
  char32_t next = 0x100;  // printable Latin-1 stands for itself, the other bytes follow from here
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
    characters_[byte] = printable ? byte : next++;
    bytes_[characters_[byte]] = static_cast<int16_t>(byte);
  }
}

std::string ByteAlphabet::spell(std::string_view bytes) const {
  std::string spelled;
  for (const char byte : bytes) append_utf8(spelled, character(static_cast<unsigned char>(byte)));
  return spelled;
}

std::optional<std::string> ByteAlphabet::bytes_of(std::string_view spelled) const {
  std::string bytes;
  for (size_t at = 0; at < spelled.size();) {
    const DecodedChar c = decode_utf8(spelled.data() + at);
    if (c.value >= kEnd || bytes_[c.value] < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(bytes_[c.value]));
    at += c.length;
  }
  return bytes;
}

}  // namespace nanovllm
