// Decoders: tokens back to text, token by token. decode() and IncrementalDetokenizer run the same
// stages, so that what is streamed adds up to what is decoded at once.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "io/tokenizer/byte_level.h"
#include "io/tokenizer/entry.h"
#include "io/tokenizer/patterns/unicode.h"

namespace nanovllm {

/// One stage of a running decode. A stage before "Fuse" or "ByteLevel" is given whole tokens, one
/// after it is given the fused text in parts.
class DecodeStage {
 public:
  virtual ~DecodeStage() = default;
  virtual void push(std::string_view piece) = 0;
  /// No more pieces come: passes on what is held back.
  virtual void finish() { next_->finish(); }
  void set_next(DecodeStage* next) { next_ = next; }

 protected:
  void pass(std::string_view piece) {
    if (!piece.empty()) next_->push(piece);
  }
  DecodeStage* next_ = nullptr;
};

/// A running decode. Not thread-safe.
class DecodeStream {
 public:
  explicit DecodeStream(std::vector<std::unique_ptr<DecodeStage>> stages);
  ~DecodeStream();
  DecodeStream(const DecodeStream&) = delete;
  DecodeStream& operator=(const DecodeStream&) = delete;

  /// Takes a token as tokenizer.json spells it.
  void push(std::string_view token) { first_->push(token); }
  void finish() { first_->finish(); }
  /// The text that has become certain since the last call: valid UTF-8.
  std::string take();

 private:
  class Output;
  std::vector<std::unique_ptr<DecodeStage>> stages_;
  std::unique_ptr<Output> output_;
  DecodeStage* first_;
};

/// The "decoder" of tokenizer.json. Immutable and thread-safe.
class Decoder {
 public:
  /// `entry` is null where the file has no decoder: tokens are then joined with spaces. Throws
  /// Error(model) for kinds and orders that are not known. `categories` and `alphabet` must outlive
  /// the decoder and its streams.
  Decoder(const Entry* entry, const CategoryTable& categories, const ByteAlphabet& alphabet);

  std::unique_ptr<DecodeStream> start() const;
  /// The bytes that a token adds to a text that other tokens have begun.
  std::string bytes_of(std::string_view token) const;

 private:
  void add_step(const Entry& entry, const CategoryTable& categories, const ByteAlphabet& alphabet);
  void add_strip(const Entry& entry);

  std::vector<std::function<std::unique_ptr<DecodeStage>()>> steps_;
  const ByteAlphabet* byte_level_ = nullptr;
  bool byte_fallback_ = false;
  // While reading:
  bool fused_ = false;  // tokens have become one text
  double growth_ = 1;   // bytes that the steps so far can make of one
};

}  // namespace nanovllm
