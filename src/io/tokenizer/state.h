// The state of a Tokenizer: everything read from a model directory. Immutable after loading.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "nanovllm/tokenizer.h"

#include "io/tokenizer/added_tokens.h"
#include "io/tokenizer/bpe.h"
#include "io/tokenizer/stages/decoder.h"
#include "io/tokenizer/stages/normalizer.h"
#include "io/tokenizer/stages/post_processor.h"
#include "io/tokenizer/stages/pre_tokenizer.h"
#include "io/tokenizer/token_bytes.h"

namespace nanovllm {

struct Tokenizer::State {
  /// Reads tokenizer.json and tokenizer_config.json; errors call them by their places. Added tokens
  /// from the id `model_vocab_size` on are left out.
  State(const Json& tokenizer_json, const std::string& place, const Json& config_json,
        const std::string& config_place, int64_t model_vocab_size);

  /// No special token is found in bytes that `literal` marks.
  void encode(std::string_view text, const ByteMarks& literal, bool parse_special,
              std::vector<int32_t>& ids) const;
  /// As tokenizer.json spells it; empty where there is none.
  std::string_view text_of(int32_t id) const;
  /// The text that the decoder is given; nothing for an unknown id.
  std::optional<std::string_view> decoder_text_of(int32_t id) const;
  std::optional<int32_t> find(std::string_view token) const;
  const AddedToken* added_token(int32_t id) const;
  bool is_special(int32_t id) const;
  int32_t vocab_size() const;

  CategoryTable categories;
  ByteAlphabet alphabet;
  Vocabulary vocabulary;        // of the model
  Vocabulary added_vocabulary;  // of the added tokens
  std::unique_ptr<const Normalizer> normalizer;
  PreTokenizerChain pre_tokenizers;
  std::unique_ptr<const Bpe> bpe;
  std::unique_ptr<const AddedTokens> added_tokens;
  std::vector<int32_t> added_index;  // by id: index into added_tokens->tokens(), or -1
  PostProcessor post_processor;
  std::unique_ptr<const Decoder> decoder;
  std::optional<int32_t> bos_id, eos_id;
  std::string chat_template, tool_template, chat_template_place;
  std::string left_out;  // added tokens, with commas between them
  std::vector<std::pair<std::string, std::string>> special_tokens;  // by name: "bos_token"
  TokenBytes token_bytes;

 private:
  size_t longest_token(const BpeOptions& options) const;
  /// The arguments and results of one encode().
  struct Job {
    bool parse_special;
    std::vector<int32_t>& ids;
    SearchBudget budget;
    Bpe::Scratch scratch{};
  };
  void encode_section(std::string_view text, const ByteMarks& literal, bool starts_input,
                      Job& job) const;
  void encode_text(std::string_view text, bool starts_input, Job& job) const;
  void read_config(const Entry& config);
};

}  // namespace nanovllm
