// Messages quote files, and files are not to be trusted: what they say is shown, never obeyed.
#include "nanovllm/error.h"

#include <gtest/gtest.h>

#include "nanovllm/tokenizer.h"

namespace nanovllm {
namespace {

std::string message(const std::string& text, ErrorKind kind = ErrorKind::model) {
  return Error(kind, text).what();
}

TEST(Error, SpellsOutWhatATerminalWouldObey) {
  EXPECT_EQ(message("a\x1b[2Jb\r\nc\td\x7f"), "a\\x1b[2Jb\\x0d\\x0ac\\x09d\\x7f");
  EXPECT_EQ(message("\u009b31m \u202e \u2066 \u2028"), "\\x9b31m \\u202e \\u2066 \\u2028");
  EXPECT_EQ(message("\xff \x9b \xc3"), "\\xff \\x9b \\xc3");
  EXPECT_EQ(message("Modell/naïve 東京 😀: \"x\""), "Modell/naïve 東京 😀: \"x\"");
}

TEST(Error, KeepsTheLinesOfAMemoryTableAlone) {
  EXPECT_EQ(message("a\nb\x1b", ErrorKind::device), "a\nb\\x1b");
  EXPECT_EQ(message("a\nb", ErrorKind::engine), "a\\x0ab");
}

TEST(Error, LeavesOutTheMiddleOfWhatIsTooLong) {
  const std::string long_one = "tokenizer.json: " + std::string(1'000'000, 'x') + ": is unknown";
  EXPECT_LT(message(long_one).size(), 2100u);
  EXPECT_EQ(message(long_one).find("tokenizer.json: x"), 0u);
  EXPECT_TRUE(message(long_one).ends_with("x: is unknown"));
  EXPECT_EQ(message(std::string(2000, 'x')), std::string(2000, 'x'));
  std::string wide;
  for (int i = 0; i < 1000; ++i) wide += "東";
  for (size_t shift = 0; shift < 3; ++shift)  // no character is cut in two
    EXPECT_EQ(message(std::string(shift, 'x') + wide).find("\\x"), std::string::npos);
}

TEST(Error, QuotesATokenizerThatWouldClearTheScreen) {
  try {
    Tokenizer::from_json(
        R"({"model": {"vocab": {"a": 0, "\u001b[2J\nerror: x": 0}, "merges": []}})");
    ADD_FAILURE() << "two tokens with one id";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("\\x1b[2J\\x0aerror: x"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace nanovllm
