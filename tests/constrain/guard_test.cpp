// The guards in front of regular expressions, EBNF and structural tags, and the grammar that begins
// after the reasoning.
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "nanovllm/error.h"

#include "constrain/ebnf_check.h"
#include "constrain/reasoning.h"
#include "constrain/regex.h"
#include "constrain/schema/match.h"
#include "constrain/structural_tag.h"
#include "io/json.h"

namespace nanovllm {
namespace {

template <class Work>
std::string refusal(Work work) {
  try {
    (void)work();
    return "";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
    return error.what();
  }
}
std::string regex_refusal(const std::string& pattern) {
  return refusal([&] { return regex_to_ebnf(pattern, "regex"); });
}
std::string ebnf_refusal(const std::string& ebnf) {
  return refusal([&] {
    check_ebnf(ebnf, "grammar");
    return 0;
  });
}
std::string tag_refusal(const std::string& tag) {
  return refusal([&] { return checked_structural_tag(tag); });
}

// Verdicts of Python's re.fullmatch and re.search with re.ASCII.
TEST(Regex, MatchesAsPythonDoes) {
  struct Case {
    const char *pattern, *text;
    bool whole, search;
  };
  for (const auto& [pattern, text, whole, search] :
       std::vector<Case>{{"a*b+", "aab", true, true},
                         {"a*b+", "aabc", false, true},
                         {"^a$", "a", true, true},
                         {"^a$", "ba", false, false},
                         {"^a|b$", "axx", false, true},
                         {"^a|b$", "xxb", false, true},
                         {"(^a|c)d", "xcd", false, true},
                         {"(^a|c)d", "xad", false, false},
                         {"[^abc]", "d", true, true},
                         {"[a-c-]{2}", "a-", true, true},
                         {"\\d{2,3}", "1234", false, true},
                         {"\\w+\\s\\W", "ab !", true, true},
                         {"(?:ab)?c", "abc", true, true},
                         {"a{0}", "", true, true},
                         {"\\u00e9\\x41\\/",
                          "\xC3\xA9"
                          "A/",
                          true, true},
                         {"(?P<n>x)(?<m>y)", "xy", true, true},
                         {".", "\n", false, false},
                         {"[\\]\\\\]", "\\", true, true},
                         {"a|", "", true, true}}) {
    EXPECT_EQ(matches(parse_regex(pattern, "t"), text), whole) << pattern << " " << text;
    EXPECT_EQ(matches(parse_regex_search(pattern, "t"), text), search) << pattern << " " << text;
  }
}

TEST(Regex, WhatAGrammarCannotSayIsRefused) {
  for (const char* pattern :
       {"(?=a)",       "(?<!a)b", "\\bword", "(a)\\1", "a++",   "\\p{L}",  "(?i)a",
        "[[:alpha:]]", "a{2,1}",  "{",       "a{,3}",  "*a",    "(a",      "a)",
        "[a",          "[b-a]",   "\\",      "a^b",    "(^a)*", "\\ud800", "\xff"})
    EXPECT_NE(regex_refusal(pattern), "") << pattern;
}

TEST(Regex, CountsThatExpandTooFarAreRefusedByTheLimitsName) {
  EXPECT_EQ(regex_refusal("(a{100}){100}"), "");
  for (const char* pattern : {"a{10001}", "(a{101}){100}", "((a{30}){30}){30}", "(a{2,101}b){100}"})
    EXPECT_NE(regex_refusal(pattern).find("kMaxRepetitions"), std::string::npos) << pattern;
  EXPECT_NE(regex_refusal(std::string(70, '(') + std::string(70, ')')).find("kMaxStructureDepth"),
            std::string::npos);
  EXPECT_NE(regex_refusal(std::string(20000, 'a')).find("kMaxPatternBytes"), std::string::npos);
}

TEST(EbnfGuard, GrammarsAsUsersWriteThemPass) {
  for (const char* ebnf :
       {"root ::= \"a\" | [b-d]+ # comment )\n", "root ::= (\"x\" y){2,4}\ny ::= [^\"\\]]*\n",
        "root ::= \"{\" \"\\\"\" [0-9]{1,3} \"}\"", "root::=a \":\" [:] # b: c\na\n::= \"::=\""})
    EXPECT_EQ(ebnf_refusal(ebnf), "") << ebnf;
}

TEST(EbnfGuard, WhatGoesTooFarIsRefused) {
  EXPECT_NE(ebnf_refusal("root ::= \"a\"{20000}").find("kMaxRepetitions"), std::string::npos);
  EXPECT_NE(ebnf_refusal("root ::= ((\"a\"{100}){100}){100}").find("kMaxRepetitions"),
            std::string::npos);
  EXPECT_NE(ebnf_refusal("root ::= " + std::string(80, '(') + std::string(80, ')'))
                .find("kMaxStructureDepth"),
            std::string::npos);
  EXPECT_NE(ebnf_refusal("root ::= Regex(\"a{99999}\")").find("Regex"), std::string::npos);
  EXPECT_NE(ebnf_refusal("root ::= \"a\" (= \"b\")").find("looks ahead"), std::string::npos);
  EXPECT_NE(ebnf_refusal("root[max_tokens=3] ::= \"a\"").find("options"), std::string::npos);
  for (const char* half : {"\"\\ud800\"", "\"\\xDFFF\"", "[a\\U0000dc00]"})
    EXPECT_NE(ebnf_refusal(std::string("root ::= ") + half).find("surrogate"), std::string::npos)
        << half;
  for (const char* lark : {"start: \"a\"", "?start : a\na: /\"/"})  // Outlines sends these
    EXPECT_NE(ebnf_refusal(lark).find("Lark"), std::string::npos) << lark;
  EXPECT_NE(ebnf_refusal("root ::= (\"a\""), "");
  EXPECT_NE(ebnf_refusal("root ::= \"a"), "");
}

TEST(StructuralTag, SchemasInItBecomeGrammars) {
  const std::string out = checked_structural_tag(
      R"({"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f="],
          "tags": [{"type": "tag", "begin": "<f=a>", "content":
            {"type": "json_schema", "json_schema": {"type": "object"}}, "end": "</f>"}]}})");
  const Json json = Json::parse(out);
  EXPECT_EQ(json["format"]["tags"][0]["content"]["type"], "grammar");
  EXPECT_EQ(json["format"]["tags"][0]["begin"], "<f=a>");
}

TEST(StructuralTag, TheOlderSpellingIsTheSameTag) {
  EXPECT_EQ(
      checked_structural_tag(
          R"({"structures": [{"begin": "<a>", "schema": {"type": "null"}, "end": "</a>"}], "triggers": ["<a"]})"),
      checked_structural_tag(
          R"({"format": {"type": "triggered_tags", "tags": [{"type": "tag", "begin": "<a>",
                    "content": {"type": "json_schema", "json_schema": {"type": "null"}}, "end": "</a>"}],
                    "triggers": ["<a"]}})"));
}

TEST(StructuralTag, WhatIsNotKnownIsRefusedByItsPath) {
  for (
      const auto& [tag, message] : std::vector<std::pair<const char*, const char*>>{
          {R"({})", "needs format"},
          {R"({"format": {"type": "magic"}})", "/format has the type"},
          {R"({"format": {"type": "any_text", "max_tokens": 3}})",
           "/format/max_tokens is not a field"},
          {R"({"format": {"type": "json_schema", "json_schema": {"not": {}}}})",
           "/format/json_schema json: #/not is not supported"},
          {R"({"format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}})",
           "/format/style is not supported"},
          {R"tag({"format": {"type": "regex", "pattern": "(?=a)"}})tag", "looks around"},
          {R"({"format": {"type": "grammar", "grammar": "root ::= \"a\"{20000}"}})",
           "kMaxRepetitions"},
          {R"({"format": {"type": "repeat", "content": {"type": "any_text"}, "min": 0, "max": 20000}})",
           "kMaxRepetitions"},
          {R"({"format": {"type": "any_text"}, "more": 1})", "/more is not a field"}})
    EXPECT_NE(tag_refusal(tag).find(message), std::string::npos) << tag << ": " << tag_refusal(tag);
}

// Takes 1 and ends with 9.
class OneThenNine final : public Grammar {
  class Matcher final : public TokenMatcher {
   public:
    void fill_mask(std::span<uint32_t> mask) override { mask[0] = taken_ ? 1U << 9 : 1U << 1; }
    bool accept(int32_t token) override {
      if (token != (taken_ ? 9 : 1)) return false;
      taken_ = true;
      return true;
    }

   private:
    bool taken_ = false;
  };

 public:
  std::unique_ptr<TokenMatcher> new_matcher() const override { return std::make_unique<Matcher>(); }
};

uint32_t mask_of(TokenMatcher& matcher) {
  uint32_t mask = 0xFFFFFFFFU;
  matcher.fill_mask({&mask, 1});
  return mask;
}

TEST(Reasoning, TheGrammarBeginsBehindItsEnd) {
  const ReasoningGrammar grammar(std::make_shared<OneThenNine>(),
                                 {.end = {4, 4, 5}, .eos = {9}, .vocab_size = 12});
  const auto matcher = grammar.new_matcher();
  EXPECT_EQ(mask_of(*matcher), 0xFFFU & ~(1U << 9));  // the text may not end before
  EXPECT_FALSE(matcher->accept(9));
  for (const int32_t token : {7, 4, 4, 4, 5}) EXPECT_TRUE(matcher->accept(token));
  EXPECT_EQ(mask_of(*matcher), 1U << 1);
  EXPECT_FALSE(matcher->accept(7));
  EXPECT_TRUE(matcher->accept(1));
  EXPECT_EQ(mask_of(*matcher), 1U << 9);
}

TEST(Reasoning, ABlockThatThePromptHasNotOpenedMayBeLeftOut) {
  const ReasoningGrammar grammar(
      std::make_shared<OneThenNine>(),
      {.begin = {1, 3}, .end = {5}, .token_budget = 1, .eos = {9}, .vocab_size = 12});
  const auto without = grammar.new_matcher();
  EXPECT_EQ(mask_of(*without), 1U << 1);  // of the answer and of the block
  EXPECT_TRUE(without->accept(1));
  EXPECT_EQ(mask_of(*without), 1U << 9 | 1U << 3);
  EXPECT_TRUE(without->accept(9));
  const auto with = grammar.new_matcher();
  for (const int32_t token : {1, 3, 7}) EXPECT_TRUE(with->accept(token));
  EXPECT_EQ(mask_of(*with), 1U << 5);  // the budget
  EXPECT_TRUE(with->accept(5));
  EXPECT_EQ(mask_of(*with), 1U << 1);
  const auto neither = grammar.new_matcher();
  EXPECT_FALSE(neither->accept(2));
}

TEST(Reasoning, ABudgetBoundsOnlyABlockThatIsOpen) {
  const ReasoningGrammar grammar(
      nullptr, {.begin = {1}, .end = {5}, .token_budget = 0, .eos = {9}, .vocab_size = 12});
  const auto plain = grammar.new_matcher();
  for (const int32_t token : {2, 1, 3}) {
    EXPECT_EQ(mask_of(*plain), 0xFFFU);
    EXPECT_TRUE(plain->accept(token));
  }
  const auto open = grammar.new_matcher();
  EXPECT_TRUE(open->accept(1));
  EXPECT_EQ(mask_of(*open), 1U << 5);
}

TEST(Reasoning, ABudgetForcesItsEnd) {
  const ReasoningGrammar grammar(nullptr,
                                 {.end = {4, 5}, .token_budget = 2, .eos = {9}, .vocab_size = 12});
  const auto matcher = grammar.new_matcher();
  EXPECT_EQ(mask_of(*matcher), 0xFFFU);  // without a grammar the text may end anywhere
  EXPECT_TRUE(matcher->accept(3));
  EXPECT_TRUE(matcher->accept(4));  // the first of the end, by itself
  EXPECT_EQ(mask_of(*matcher), 1U << 5);
  EXPECT_FALSE(matcher->accept(4));
  EXPECT_TRUE(matcher->accept(5));
  EXPECT_EQ(mask_of(*matcher), 0xFFFU);
}

}  // namespace
}  // namespace nanovllm
