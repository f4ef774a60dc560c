// All reference vectors of the eight tokenizers in ../shared/tokenizers: ids and text as the
// Hugging Face library gives them.
#include <filesystem>
#include <optional>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "nanovllm/tokenizer.h"

#include "io/json.h"

namespace nanovllm {
namespace {

const std::string kShared = NANOVLLM_SOURCE_DIR "/../shared/tokenizers";

class ReferenceTokenizer : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(kShared)) GTEST_SKIP() << kShared << " is not there";
    tokenizer_.emplace(directory());
  }
  std::string directory() const { return kShared + "/" + GetParam(); }
  std::optional<Tokenizer> tokenizer_;
};

/// The text in pieces, as a stream of tokens gives it.
std::string streamed(const Tokenizer& tokenizer, const std::vector<int32_t>& ids, bool skip) {
  IncrementalDetokenizer stream(tokenizer, skip);
  std::string text;
  for (const int32_t id : ids) {
    const std::string piece = stream.add(id);
    EXPECT_NO_THROW(Json(piece).dump())
        << "half a character after id " << id;  // dump() refuses bad UTF-8
    text += piece;
  }
  return text + stream.flush();
}

TEST_P(ReferenceTokenizer, GivesTheIdsOfLlamaCppVectors) {
  const std::string path = directory() + "/vectors.json";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << "no vectors for this one";
  for (const Json& vector : read_json_file(path)) {
    const std::string text = vector.at("text");
    EXPECT_EQ(tokenizer_->encode(text, false), vector.at("ids").get<std::vector<int32_t>>())
        << text;
  }
}

TEST_P(ReferenceTokenizer, GivesTheIdsAndTextOfAllStressStrings) {
  const Json texts = read_json_file(kShared + "/stress.json");
  const Json answers = read_json_file(directory() + "/stress_ids.json");
  ASSERT_EQ(texts.size(), answers.size());
  for (size_t i = 0; i < texts.size(); ++i) {
    SCOPED_TRACE(i);
    const std::string text = texts[i];
    const Json& answer = answers[i];
    const auto ids = answer.at("ids").get<std::vector<int32_t>>();
    const auto with_special = answer.value("ids_special", ids);
    const std::string decoded = answer.value("decoded", text);
    const std::string decoded_skip = answer.value("decoded_skip", decoded);
    EXPECT_EQ(tokenizer_->encode(text, false), ids);
    EXPECT_EQ(tokenizer_->encode(text, true), with_special);
    EXPECT_EQ(tokenizer_->decode(ids, false), decoded);
    EXPECT_EQ(tokenizer_->decode(with_special, true), decoded_skip);
    EXPECT_EQ(streamed(*tokenizer_, ids, false), decoded);
    EXPECT_EQ(streamed(*tokenizer_, with_special, true), decoded_skip);
  }
}

TEST_P(ReferenceTokenizer, EncodesWithoutSpecialIdsWhereTheyAreNotParsed) {
  for (const Json& text : read_json_file(kShared + "/stress.json"))
    for (const int32_t id : tokenizer_->encode(text.get<std::string>(), false, false))
      ASSERT_TRUE(!tokenizer_->is_special(id) || tokenizer_->id_to_token(id) == "<unk>") << text;
}

INSTANTIATE_TEST_SUITE_P(All, ReferenceTokenizer,
                         testing::Values("qwen3", "llama3", "gpt2", "llama2", "phi3", "mistral",
                                         "starcoder2", "deepseek-coder"),
                         [](const auto& tested) {
                           std::string name = tested.param;
                           std::erase(name, '-');
                           return name;
                         });

}  // namespace
}  // namespace nanovllm
