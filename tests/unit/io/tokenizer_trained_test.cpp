// Small tokenizers of every kind (tests/data/tokenizers, made by tools/make_tokenizers.py) against
// what the Hugging Face library answers.

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "nanovllm/tokenizer.h"

#include "io/json.h"
#include "io/utf8.h"

namespace nanovllm {
namespace {

const std::string kData = NANOVLLM_SOURCE_DIR "/tests/data/tokenizers/";

class TrainedTokenizer : public testing::TestWithParam<const char*> {
 protected:
  Tokenizer tokenizer_{kData + GetParam()};
  Json expected_ = read_json_file(kData + GetParam() + "/expected.json");
};

TEST_P(TrainedTokenizer, GivesTheIdsOfTheReferenceLibrary) {
  ASSERT_GE(expected_.size(), 150u);
  for (const Json& row : expected_) {
    const std::string text = row.at("text");
    SCOPED_TRACE(row.at("text").dump());
    const auto ids = row.at("ids").get<std::vector<int32_t>>();
    EXPECT_EQ(tokenizer_.encode(text, false), ids);
    EXPECT_EQ(tokenizer_.encode(text, true), row.value("ids_special", ids));
    EXPECT_EQ(tokenizer_.encode(text, false, false), row.value("ids_plain", ids));
  }
}

// The reference's ids are never fewer than what the text's size alone promises.
TEST_P(TrainedTokenizer, PromisesNoMoreTokensThanThereAre) {
  for (const Json& row : expected_)
    EXPECT_LE(tokenizer_.min_tokens(row.at("text").get<std::string>()), std::ssize(row.at("ids")))
        << row.at("text");
  for (int32_t id = 0; id < tokenizer_.vocab_size(); ++id) {
    std::string text;
    for (int i = 0; i < 50; ++i) text += tokenizer_.decode({&id, 1}, false);
    if (find_invalid_utf8(text) != std::string::npos) continue;
    EXPECT_LE(tokenizer_.min_tokens(text), std::ssize(tokenizer_.encode(text, false))) << id;
  }
  for (const char* text :
       {" ", "\n", "\u00a0", "\U0001f600", "\u212b\u0301", "\u1fbe\u0308\u0301"}) {
    std::string many;
    for (int i = 0; i < 2000; ++i) many += text;
    EXPECT_LE(tokenizer_.min_tokens(many), std::ssize(tokenizer_.encode(many, false)))
        << Json(text);
  }
}

TEST_P(TrainedTokenizer, DecodesAsTheReferenceLibraryDoes) {
  for (const Json& row : expected_) {
    SCOPED_TRACE(row.at("text").dump());
    const auto ids = row.at("ids").get<std::vector<int32_t>>();
    EXPECT_EQ(tokenizer_.decode(ids, false), row.at("decoded").get<std::string>());
    EXPECT_EQ(tokenizer_.decode(row.value("ids_special", ids), true),
              row.at("decoded_skip").get<std::string>());
  }
}

/// The decoded text as a stream gives it; every piece must be whole characters.
std::string streamed(const Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
  IncrementalDetokenizer stream(tokenizer, false);
  std::string text;
  for (const int32_t id : ids) {
    const std::string piece = stream.add(id);
    EXPECT_EQ(find_invalid_utf8(piece), std::string::npos) << "half a character after id " << id;
    text += piece;
  }
  return text + stream.flush();
}

TEST_P(TrainedTokenizer, StreamsWhatItDecodes) {
  for (const Json& row : expected_)
    EXPECT_EQ(streamed(tokenizer_, row.at("ids").get<std::vector<int32_t>>()),
              row.at("decoded").get<std::string>());
}

TEST_P(TrainedTokenizer, StreamsAnySequenceOfIdsAsDecoded) {
  uint32_t state = 1;
  for (int round = 0; round < 300; ++round) {
    std::vector<int32_t> ids(round % 40);
    for (int32_t& id : ids) {
      state = state * 1664525 + 1013904223;
      id = static_cast<int32_t>((state >> 8) % static_cast<uint32_t>(tokenizer_.vocab_size() + 2));
    }
    EXPECT_EQ(streamed(tokenizer_, ids), tokenizer_.decode(ids, false));
  }
}

TEST_P(TrainedTokenizer, FindsEveryTokenByItsText) {
  for (int32_t id = 0; id < tokenizer_.vocab_size(); ++id)
    EXPECT_EQ(tokenizer_.token_to_id(tokenizer_.id_to_token(id)), id);
}

INSTANTIATE_TEST_SUITE_P(All, TrainedTokenizer,
                         testing::Values("gpt2", "llama3", "qwen2", "gpt4o", "deepseek", "llama",
                                         "metaspace", "added", "normalizers", "splits", "unknown",
                                         "words"),
                         [](const auto& tested) { return std::string(tested.param); });

TEST(MinTokens, AreKnownWhereNoTextCanBeLost) {
  const std::string text(1'000'000, 'x');
  for (const char* name : {"gpt2", "llama", "llama3", "qwen2", "deepseek"})
    EXPECT_GT(Tokenizer(kData + name).min_tokens(text), 1000) << name;
  Json json = read_json_file(kData + "gpt2/tokenizer.json");
  const auto promised = [&] { return Tokenizer::from_json(json.dump()).min_tokens(text); };
  const int64_t usual = promised();
  json["normalizer"] = {{"type", "NFC"}};
  EXPECT_EQ(promised(), usual / 4);
  json["normalizer"] = {{"type", "Replace"}, {"pattern", {{"String", "xxxx"}}}, {"content", "x"}};
  EXPECT_EQ(promised(), usual / 4);
  json["normalizer"]["content"] = "";  // drops text: nothing is known
  EXPECT_EQ(promised(), 0);
  json["normalizer"] = {{"type", "Strip"}};
  EXPECT_EQ(Tokenizer::from_json(json.dump()).min_tokens(std::string(1'000'000, ' ')), 0);
  EXPECT_EQ(promised(), usual);
}

TEST(TokenizerConfig, GivesSpecialTokensAndTheDefaultTemplate) {
  const Tokenizer tokenizer(kData + "llama");
  EXPECT_EQ(tokenizer.bos_token_id(), 1);
  EXPECT_EQ(tokenizer.eos_token_id(), 2);
  EXPECT_EQ(tokenizer.chat_template(), "d");
  EXPECT_TRUE(tokenizer.is_special(1));
  EXPECT_FALSE(tokenizer.is_special(10));
}

}  // namespace
}  // namespace nanovllm
