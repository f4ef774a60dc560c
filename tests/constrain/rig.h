// Grammars over a small vocabulary (bytes and a few pieces), and texts that are taken token by
// token.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "nanovllm/error.h"

#include "constrain/grammar_compiler.h"
#include "engine/byte_tokenizer.h"

namespace nanovllm {

class GrammarRig {
 public:
  static constexpr int32_t kEos = 300;

  bool has_module() const {
    std::string why;
    return !grammar_library(why).empty();
  }

  std::shared_ptr<const Grammar> compile(const StructuredOutputs& asked) {
    return compiler_.compile(asked);
  }

  /// The same, null where compilation took longer than its limit.
  std::shared_ptr<const Grammar> compile_in_time(const StructuredOutputs& asked) {
    try {
      return compile(asked);
    } catch (const Error& error) {
      if (std::string(error.what()).find("kMaxCompileSeconds") == std::string::npos) throw;
      return nullptr;
    }
  }

  /// Whether the masks lead through `text`, cut into tokens in one of several ways, to its end.
  bool takes(const Grammar& grammar, const std::string& text, unsigned cut = 0) const {
    const auto matcher = grammar.new_matcher();
    for (const int32_t token : tokens_of(text, cut))
      if (!is_allowed(*matcher, token) || !matcher->accept(token)) return false;
    return is_allowed(*matcher, kEos) && matcher->accept(kEos);
  }

  static bool is_allowed(TokenMatcher& matcher, int32_t token) {
    std::vector<uint32_t> mask((kVocabSize + 31) / 32);
    matcher.fill_mask(mask);
    return (mask[static_cast<size_t>(token / 32)] >> (token % 32) & 1U) != 0;
  }

  /// With `cut` bit i set, place i takes the longest piece instead of a byte.
  std::vector<int32_t> tokens_of(const std::string& text, unsigned cut) const {
    std::vector<int32_t> tokens;
    for (size_t at = 0; at < text.size();) {
      int32_t token = static_cast<unsigned char>(text[at]);
      size_t length = 1;
      for (size_t i = 0; i < kPieces.size(); ++i)
        if ((cut >> (tokens.size() % 32) & 1U) != 0 && kPieces[i].size() > length &&
            text.compare(at, kPieces[i].size(), kPieces[i]) == 0) {
          token = 256 + static_cast<int32_t>(i);
          length = kPieces[i].size();
        }
      tokens.push_back(token);
      at += length;
    }
    return tokens;
  }

  std::string text_of(const std::vector<int32_t>& tokens) const {
    std::string text;
    for (const int32_t token : tokens)
      if (token < 256 + std::ssize(kPieces))
        text += token < 256 ? std::string(1, static_cast<char>(token))
                            : kPieces[static_cast<size_t>(token - 256)];
    return text;
  }

  static constexpr int64_t kVocabSize = 301;

 private:
  const std::vector<std::string> kPieces = {"{\"", "\":",  "\": \"", "\", \"", "\"}",
                                            "},",  "true", "null",   "ab",     "12",
                                            ".5",  "[[",   "]}",     "\\u00"};
  ByteTokenizer tokenizer_{kPieces};
  GrammarCompiler compiler_{tokenizer_.shared(), kVocabSize, {kEos}};
};

inline StructuredOutputs schema(std::string json) { return {.json = std::move(json)}; }

}  // namespace nanovllm
