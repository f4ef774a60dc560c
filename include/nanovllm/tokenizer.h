// Tokenizer: what tokenizer.json says, as the Hugging Face library `tokenizers` does it.
// Byte-level BPE (GPT-2, Llama 3, Qwen) and SentencePiece-style BPE with byte fallback (Llama 2,
// Mistral, Phi 3).
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "nanovllm/params.h"

namespace nanovllm {

class DecodeStream;

/// Text to token ids and back. Immutable once made: its methods may be called from any thread.
class Tokenizer {
 public:
  /// Reads tokenizer.json (required) and tokenizer_config.json (optional) of a model directory.
  /// Added tokens from the id `vocab_size` on, which the model has not, are left out. Throws
  /// Error(model) naming the file and the entry: unknown kinds are refused by name, never guessed.
  explicit Tokenizer(const std::string& model_directory,
                     int64_t vocab_size = std::numeric_limits<int64_t>::max());
  /// The same from the texts of the two files; an empty configuration stands for none.
  static Tokenizer from_json(std::string_view tokenizer_json,
                             std::string_view tokenizer_config_json = {});
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  /// `text` must be valid UTF-8, or Error(invalid_argument) names the offset of the bad byte.
  /// add_special_tokens applies the post-processor (BOS ...). With parse_special_tokens = false,
  /// text that spells a special token ("<|im_end|>") is encoded as plain text; added tokens that
  /// are not special are still recognised. `literal`, in ascending order, does the same for parts
  /// of the text: a special token that shares a byte with them is none.
  std::vector<int32_t> encode(std::string_view text, bool add_special_tokens = true,
                              bool parse_special_tokens = true,
                              std::span<const TextRange> literal = {}) const;
  /// A lower bound of the number of tokens that encode(text) gives, found without encoding: the
  /// text's bytes divided by the longest token's. 0 where this tokenizer may drop text.
  int64_t min_tokens(std::string_view text) const;
  /// Bytes that are no UTF-8 become U+FFFD, as in the reference library. Ids outside
  /// the vocabulary are ignored.
  std::string decode(std::span<const int32_t> ids, bool skip_special_tokens = true) const;

  int64_t vocab_size() const;  ///< one more than the largest id, added tokens included
  /// The added tokens that were left out, with commas between them: text like any other.
  const std::string& left_out() const;
  /// The id of a token that is spelled as in tokenizer.json.
  std::optional<int32_t> token_to_id(std::string_view token) const;
  /// As tokenizer.json spells it; empty where there is none. Valid as long as the tokenizer.
  std::string_view id_to_token(int32_t id) const;
  /// The bytes, perhaps part of a character, that a token adds to a text after other tokens; empty
  /// for an id outside the vocabulary.
  std::string token_bytes(int32_t id) const;
  /// Whether decode() leaves it out with skip_special_tokens.
  bool is_special(int32_t id) const;
  std::optional<int32_t> bos_token_id() const;  ///< from tokenizer_config.json
  std::optional<int32_t> eos_token_id() const;  ///< the same
  /// The tokens that tokenizer_config.json names, by their names: "bos_token", "pad_token" ...
  const std::vector<std::pair<std::string, std::string>>& special_tokens() const;
  /// tokenizer_config.json's chat_template, or chat_template.jinja beside it; empty where there is
  /// none.
  const std::string& chat_template() const;
  /// The template of conversations with tools, where the model has another one for them, named
  /// tool_use; else empty.
  const std::string& tool_template() const;
  /// The file that it came from, for messages.
  const std::string& chat_template_place() const;

 private:
  friend class ControlTokens;
  friend class IncrementalDetokenizer;
  struct State;
  explicit Tokenizer(std::unique_ptr<const State> state);
  std::unique_ptr<const State> state_;
};

/// Turns a stream of token ids into a stream of text: never half a UTF-8 character, and the pieces
/// add up to exactly what decode() gives for all ids. Amortised O(1) per token.
class IncrementalDetokenizer {
 public:
  /// The tokenizer must outlive the detokenizer; it may be moved. `visible` are special tokens that
  /// are not skipped.
  explicit IncrementalDetokenizer(const Tokenizer& tokenizer, bool skip_special_tokens = true,
                                  std::span<const int64_t> visible = {});
  ~IncrementalDetokenizer();
  IncrementalDetokenizer(IncrementalDetokenizer&&) noexcept;
  IncrementalDetokenizer& operator=(IncrementalDetokenizer&&) noexcept;

  /// Text that became certain with this token; may be empty.
  std::string add(int32_t id);
  /// The text still held back (an incomplete character as U+FFFD). The next add() starts a new
  /// text.
  std::string flush();

 private:
  const Tokenizer::State* state_;
  bool skip_special_tokens_;
  std::vector<int64_t> visible_;
  std::unique_ptr<DecodeStream> stream_;
};

}  // namespace nanovllm
