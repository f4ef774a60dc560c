// The language of the module and its helper process, over a socket: messages of a length and
// that many bytes. The first message to the helper is the vocabulary; each further one is a
// source, and is answered by a status and either the compiled grammar or the reason.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "nanovllm/error.h"

#include "constrain/grammar_module.h"

namespace nanovllm {

enum class CompileStatus : uint8_t { done, refused, out_of_memory };

/// Fields one after the other, each with its length.
class MessageWriter {
 public:
  void add(uint64_t value) { bytes_.append(reinterpret_cast<const char*>(&value), sizeof value); }
  void add(std::string_view text) {
    add(text.size());
    bytes_ += text;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

class MessageReader {
 public:
  explicit MessageReader(std::string_view bytes) : bytes_(bytes) {}
  uint64_t number() {
    uint64_t value = 0;
    take(sizeof value).copy(reinterpret_cast<char*>(&value), sizeof value);
    return value;
  }
  std::string text() { return std::string(take(number())); }

 private:
  std::string_view take(uint64_t size) {
    if (size > bytes_.size()) throw Error(ErrorKind::engine, "a message is cut");
    const std::string_view part = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return part;
  }
  std::string_view bytes_;
};

inline std::string to_message(const TokenTable& vocabulary) {
  MessageWriter out;
  out.add(vocabulary.texts.size());
  for (const std::string& text : vocabulary.texts) out.add(text);
  out.add(vocabulary.stop_ids.size());
  for (const int32_t id : vocabulary.stop_ids) out.add(static_cast<uint64_t>(id));
  out.add(vocabulary.common_rules);
  return out.bytes();
}

inline TokenTable read_token_table(std::string_view message) {
  MessageReader in(message);
  TokenTable vocabulary;
  for (uint64_t left = in.number(); left > 0; --left) vocabulary.texts.push_back(in.text());
  for (uint64_t left = in.number(); left > 0; --left)
    vocabulary.stop_ids.push_back(static_cast<int32_t>(in.number()));
  vocabulary.common_rules = in.text();
  return vocabulary;
}

}  // namespace nanovllm
