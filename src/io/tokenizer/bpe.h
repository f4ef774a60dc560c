// Byte-pair encoding: splits a piece of text into the tokens that its merges lead to.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/tokenizer/byte_level.h"
#include "io/tokenizer/vocabulary.h"
#include "io/utf8.h"

namespace nanovllm {

/// Fields of tokenizer.json's model, under their names there.
struct BpeOptions {
  std::optional<std::string> unk_token;
  bool fuse_unk = false;
  bool byte_fallback = false;
  bool ignore_merges = false;
  /// Pieces are bytes and tokens are spelled in the byte alphabet (GPT-2); else both are text
  /// (SentencePiece).
  bool byte_level = false;
};

class Bpe {
 public:
  /// Two tokens that become one. Earlier merges go first.
  struct Merge {
    std::string_view left, right;
  };
  /// Working memory of encode(), to be reused from piece to piece.
  class Scratch;

  /// `vocabulary` must outlive this object. Throws Error(model), starting with `where`, for a merge
  /// of unknown tokens or an unknown unk_token.
  Bpe(const Vocabulary& vocabulary, const std::vector<Merge>& merges, const BpeOptions& options,
      const ByteAlphabet& alphabet, const std::string& where);
  ~Bpe();

  /// Appends the ids of one piece. Thread-safe; O(n log n).
  void encode(std::string_view piece, std::vector<int32_t>& ids, Scratch& scratch) const;

 private:
  struct Symbol;
  /// Whether a token's own text is encoded as that token. Found out when first needed: it spares
  /// most words their merges, and learning it for all tokens would make loading slow. Relaxed
  /// atomics suffice: all threads find the same answer.
  enum class Whole : uint8_t { unknown, yes, no };

  class PairTable {
   public:
    struct Entry {
      uint64_t pair = kFree;
      uint32_t rank = 0;
      int32_t merged = 0;
    };
    explicit PairTable(size_t expected = 0);
    void set(int32_t left, int32_t right, uint32_t rank, int32_t merged);
    const Entry* find(int32_t left, int32_t right) const;

   private:
    static constexpr uint64_t kFree = ~uint64_t{0};
    size_t slot_of(uint64_t pair) const;
    std::vector<Entry> entries_;  // a power of two, at most half full
    size_t used_ = 0;
    int shift_;
  };

  void add_merges(const std::vector<Merge>& merges, const std::string& where);
  void index_bytes();
  void index_text();
  void index_neighbours(std::string_view text);
  int32_t char_id(std::string_view text, size_t at, const DecodedChar& c) const;
  size_t segment_end(std::string_view piece, size_t begin) const;
  void encode_segment(std::string_view segment, std::vector<int32_t>& ids, Scratch& scratch) const;
  void start_symbols(std::string_view segment, Scratch& scratch) const;
  void start_text_symbols(std::string_view segment, Scratch& scratch) const;
  void merge(Scratch& scratch) const;
  void merge_short(Scratch& scratch) const;
  void merge_long(Scratch& scratch) const;
  void find_merge(Symbol& left, int32_t right) const;

  const Vocabulary& vocabulary_;
  const ByteAlphabet& alphabet_;
  BpeOptions options_;
  int32_t unk_id_ = Vocabulary::kNone;
  PairTable pairs_;
  Vocabulary byte_tokens_;                   // byte_level: the tokens by the bytes they stand for
  std::array<int32_t, 256> byte_ids_{};      // byte_level: tokens of one byte
  std::array<int32_t, 256> fallback_ids_{};  // "<0x00>" to "<0xFF>"
  std::vector<int32_t> char_ids_;            // text: tokens of one character below U+10000
  /// Text: pairs of neighbouring characters inside any merged token. No merge can cross a place
  /// between two known characters that are not such a pair, so that the text can be cut there.
  PairTable neighbours_;
  std::unique_ptr<std::atomic<Whole>[]> whole_;  // by id
};

class Bpe::Scratch {
 private:
  friend class Bpe;
  std::vector<Symbol> symbols_;
  struct Candidate {
    uint64_t key;  // rank, then position: the order in which merges happen
    bool operator>(const Candidate& other) const { return key > other.key; }
  };
  std::vector<Candidate> heap_;

 public:
  Scratch();
  ~Scratch();
};

}  // namespace nanovllm
