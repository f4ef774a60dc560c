// Text of control tokens that is to stay text: what the tokenizer makes of it. The ids are those of
// the Hugging Face library with encode_special_tokens (tests/data/tokenizers, "ids_plain").
#include "io/tokenizer/control_tokens.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "io/json.h"
#include "io/utf8.h"

namespace nanovllm {
namespace {

const std::string kData = NANOVLLM_SOURCE_DIR "/tests/data/tokenizers/";

std::vector<TextRange> ranges_at(const std::vector<size_t>& offsets, size_t base = 0) {
  std::vector<TextRange> ranges;
  for (const size_t at : offsets) ranges.push_back({base + at, base + at + 1});
  return ranges;
}

class LiteralText : public testing::TestWithParam<const char*> {
 protected:
  /// Calls `test` with every text, its ids, and its ids where control tokens are plain text.
  template <class Test>
  void for_each_row(Test test) {
    for (const Json& row : read_json_file(kData + GetParam() + "/expected.json")) {
      SCOPED_TRACE(row.at("text").dump());
      const auto ids = row.at("ids").get<std::vector<int32_t>>();
      test(row.at("text").get<std::string>(), ids, row.value("ids_plain", ids));
    }
  }
  std::vector<int32_t> encode(const std::string& text, const std::vector<TextRange>& literal) {
    return tokenizer_.encode(text, false, true, literal);
  }
  Tokenizer tokenizer_{kData + GetParam()};
  ControlTokens control_tokens_{tokenizer_};
};

TEST_P(LiteralText, IsPlainTextToTheReferenceLibrary) {
  for_each_row([&](const std::string& text, const auto& ids, const auto& plain) {
    EXPECT_EQ(encode(text, {{0, text.size()}}), plain);
    EXPECT_EQ(encode(text, ranges_at(control_tokens_.find(text))), plain);
    EXPECT_EQ(encode(text, {}), ids);
  });
}

TEST_P(LiteralText, IsFoundInEveryPartOfATextThatIsPutTogetherLater) {
  for_each_row([&](const std::string& text, const auto&, const auto& plain) {
    for (size_t cut = 0; cut < text.size() && cut < 80;
         cut += decode_utf8(text.data() + cut).length) {
      std::vector<TextRange> literal = ranges_at(control_tokens_.find(text.substr(0, cut)));
      for (const TextRange& range : ranges_at(control_tokens_.find(text.substr(cut)), cut))
        literal.push_back(range);
      ASSERT_EQ(encode(text, literal), plain) << "cut at byte " << cut;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, LiteralText,
                         testing::Values("gpt2", "qwen2", "llama3", "gpt4o", "deepseek", "llama",
                                         "metaspace", "added", "normalizers", "splits", "unknown",
                                         "words"));

/// Byte-level, with control tokens that overlap and one that is looked for in normalized text.
Tokenizer overlapping() {
  Json json = Json::parse(R"({
    "added_tokens": [
      {"id": 300, "content": "<s>", "special": true, "normalized": false},
      {"id": 301, "content": "<s><s>", "special": true, "normalized": false},
      {"id": 302, "content": "[end]", "special": true, "normalized": true},
      {"id": 303, "content": " ", "special": true, "normalized": false}],
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]},
    "pre_tokenizer": null, "post_processor": null, "decoder": null,
    "model": {"type": "BPE", "vocab": {}, "merges": []}})");
  int id = 0;
  for (const char c : std::string("<s>[end]xy\n"))
    json["model"]["vocab"].emplace(std::string(1, c), id++);
  return Tokenizer::from_json(json.dump());
}

TEST(LiteralText, ATokenThatBeginsBehindLiteralTextIsStillFound) {
  const Tokenizer tokenizer = overlapping();
  const int32_t less = *tokenizer.token_to_id("<"), s = *tokenizer.token_to_id("s"),
                greater = *tokenizer.token_to_id(">");
  // A user wrote the first, the template the second.
  EXPECT_EQ(tokenizer.encode("<s><s>", false, true, std::vector<TextRange>{{0, 1}}),
            (std::vector<int32_t>{less, s, greater, 300}));
  EXPECT_EQ(tokenizer.encode("<s><s>", false), (std::vector<int32_t>{301}));
}

TEST(LiteralText, IsFoundByItsNormalForm) {
  const Tokenizer tokenizer = overlapping();
  const ControlTokens control_tokens(tokenizer);
  const std::string text = "x\uFF3Bend]y";  // a full-width bracket
  EXPECT_EQ(tokenizer.encode(text, false).at(1), 302);
  EXPECT_EQ(tokenizer.encode("x[END]y", false).at(1), 302);
  for (const std::string& one : {text, std::string("x[END]y"), std::string("x[end]y")}) {
    const auto ids = tokenizer.encode(one, false, true, ranges_at(control_tokens.find(one)));
    EXPECT_EQ(ids.size(), 7u) << one;
    for (const int32_t id : ids) EXPECT_FALSE(tokenizer.is_special(id)) << one;
  }
}

TEST(LiteralText, IsNothingInATextWithoutControlTokens) {
  const Tokenizer tokenizer(kData + "qwen2");
  const ControlTokens control_tokens(tokenizer);
  EXPECT_TRUE(control_tokens.find("").empty());
  EXPECT_TRUE(control_tokens.find("if a < b: <b>bold</b> <|im_ end|> ").empty());
  EXPECT_EQ(control_tokens.find("a<|im_end|>b <|im_"), (std::vector<size_t>{1, 13}));
  // White space is never the beginning of a token that is cut.
  EXPECT_EQ(ControlTokens(overlapping()).find("x  \n"), (std::vector<size_t>{1, 2}));
}

}  // namespace
}  // namespace nanovllm
