// Texts whose tokens are drawn at random from the masks: each text that ends is one that
// the structure allows, and none comes to a place where no token is left.
//
// With NANOVLLM_GENERATIONS=FILE the texts are written there as JSON lines, for
// tests/constrain/check_generations.py, which judges them with jsonschema and re.
#include <cstdlib>
#include <fstream>
#include <random>

#include <nlohmann/json.hpp>

#include "constrain/regex.h"
#include "constrain/rig.h"
#include "constrain/schema/match.h"
#include "constrain/schema/schema_reader.h"
#include "io/json.h"

namespace nanovllm {
namespace {

struct Walk {
  std::string text;
  bool ended = false;
};

/// Draws tokens until the text ends, or `most` are drawn. Now and then it prefers to end.
Walk draw(const GrammarRig& rig, const Grammar& grammar, std::mt19937& random, int most) {
  const auto matcher = grammar.new_matcher();
  std::vector<int32_t> tokens;
  std::vector<uint32_t> mask((GrammarRig::kVocabSize + 31) / 32);
  for (int i = 0; i < most; ++i) {
    matcher->fill_mask(mask);
    std::vector<int32_t> allowed;
    for (int32_t id = 0; id < GrammarRig::kVocabSize; ++id)
      if (mask[static_cast<size_t>(id / 32)] >> (id % 32) & 1U) allowed.push_back(id);
    EXPECT_FALSE(allowed.empty());
    const bool can_end = allowed.back() == GrammarRig::kEos;
    int32_t token = allowed[random() % allowed.size()];
    // Marks that close something, so that texts come to an end.
    if (random() % 3 != 0)
      for (const char close : {'"', '}', ']', ',', ':'})
        if (mask[static_cast<size_t>(close / 32)] >> (close % 32) & 1U) {
          token = close;
          break;
        }
    if (can_end && random() % 4 == 0) token = GrammarRig::kEos;
    EXPECT_TRUE(matcher->accept(token));
    if (token == GrammarRig::kEos) return {rig.text_of(tokens), true};
    tokens.push_back(token);
  }
  return {rig.text_of(tokens), false};
}

class Generations : public testing::Test {
 protected:
  void SetUp() override {
    if (!rig_.has_module()) GTEST_SKIP() << "without the grammar module";
    if (const char* path = std::getenv("NANOVLLM_GENERATIONS")) {
      out_.open(path, std::ios::app);
      factor_ = 20;
    }
  }
  void record(const char* kind, const Json& asked, const std::string& text) {
    if (out_.is_open())
      out_ << Json{{"kind", kind}, {"asked", asked}, {"text", text}}.dump(
                  -1, ' ', false, Json::error_handler_t::replace)
           << '\n';
  }

  GrammarRig rig_;
  std::mt19937 random_{7};
  std::ofstream out_;
  int factor_ = 1;
};

TEST_F(Generations, OfSchemasParseAndValidate) {
  std::ifstream in(std::string(NANOVLLM_SOURCE_DIR) + "/tests/data/schemas/programs.jsonl");
  int ended = 0, count = 0;
  for (std::string line; std::getline(in, line); ++count) {
    if (count % (factor_ == 1 ? 25 : 1) != 0) continue;
    const Json wanted = Json::parse(line)["schema"];
    const auto grammar = rig_.compile_in_time(schema(wanted.dump()));
    if (!grammar) continue;
    for (int i = 0; i < (factor_ == 1 ? 3 : 20); ++i) {
      const Walk walk = draw(rig_, *grammar, random_, 400);
      if (!walk.ended) continue;
      ++ended;
      const Json value = Json::parse(walk.text, nullptr, false);
      ASSERT_FALSE(value.is_discarded()) << wanted.dump() << "\n" << walk.text;
      EXPECT_TRUE(SchemaReader(wanted).is_valid(value, {&wanted})) << wanted.dump() << "\n"
                                                                   << walk.text;
      record("json", wanted, walk.text);
    }
  }
  EXPECT_GT(ended, 5);
}

TEST_F(Generations, OfRegularExpressionsMatchThem) {
  for (const char* pattern :
       {"[a-z]+@[a-z]+\\.(com|org)", "(\\d{3}-)?\\d{3}-\\d{4}", "(a|bc)*d?", "[^\\n\"]{2,5}x",
        "-?(0|[1-9]\\d*)(\\.\\d+)?", "(yes|no|maybe)( \\w{1,3}){0,2}", "\\S+\\s\\S"}) {
    const auto grammar = rig_.compile({.regex = pattern});
    for (int i = 0; i < 20 * factor_; ++i) {
      const Walk walk = draw(rig_, *grammar, random_, 60);
      if (!walk.ended) continue;
      EXPECT_TRUE(matches(parse_regex(pattern, "t"), walk.text)) << pattern << ": " << walk.text;
      record("regex", pattern, walk.text);
    }
  }
}

TEST_F(Generations, OfChoicesAreOneOfThem) {
  const std::vector<std::string> texts = {"a", "ab", "abc", "tea time", "{\"", "\xC3\xA9t\xC3\xA9"};
  const auto grammar = rig_.compile({.choice = texts});
  for (int i = 0; i < 50 * factor_; ++i) {
    const Walk walk = draw(rig_, *grammar, random_, 20);
    ASSERT_TRUE(walk.ended);
    EXPECT_EQ(std::ranges::count(texts, walk.text), 1) << walk.text;
    record("choice", texts, walk.text);
  }
}

}  // namespace
}  // namespace nanovllm
