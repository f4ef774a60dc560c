// From what a request asks for to masks, through the module and its helper process.
#include <chrono>
#include <csignal>
#include <regex>
#include <thread>

#include <nlohmann/json.hpp>
#include <sys/wait.h>

#include "nanovllm/error.h"

#include "constrain/limits.h"
#include "constrain/rig.h"
#include "unit/child_processes.h"

namespace nanovllm {
namespace {

class Compiled : public testing::Test {
 protected:
  void SetUp() override {
    if (!rig_.has_module()) GTEST_SKIP() << "without the grammar module";
  }
  bool takes(const StructuredOutputs& asked, const std::string& text) {
    const auto grammar = rig_.compile(asked);
    const bool by_bytes = rig_.takes(*grammar, text);
    EXPECT_EQ(rig_.takes(*grammar, text, 0xFFFFFFFFU), by_bytes) << text;
    return by_bytes;
  }
  std::string refusal(const StructuredOutputs& asked) {
    try {
      (void)rig_.compile(asked);
      return "";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
      return error.what();
    }
  }
  GrammarRig rig_;
};

struct Case {
  std::string schema;
  std::vector<std::string> valid, invalid;
};

TEST_F(Compiled, SchemasAreEnforcedKeywordByKeyword) {
  for (
      const auto& [text, valid, invalid] : std::vector<Case>{
          {R"({"type": "integer", "minimum": -12, "maximum": 205})",
           {"-12", "-1", "0", "9", "10", "99", "199", "205"},
           {"-13", "206", "1.5", "00", "-0", "1e1"}},
          {R"({"type": "integer", "exclusiveMinimum": 7})",
           {"8", "10", "123456"},
           {"7", "-8", "0"}},
          {R"({"type": "number", "minimum": 0.25, "exclusiveMaximum": 10})",
           {"0.25", "0.3", "1", "9.99", "0.2501"},
           {"0.2", "0", "10", "10.1", "-1", "0.24999"}},
          {R"({"type": "number", "maximum": -1.5})",
           {"-1.5", "-1.51", "-20"},
           {"-1.4", "0", "1", "-1"}},
          {R"({"type": "integer", "multipleOf": 7})",
           {"0", "7", "-14", "49", "700"},
           {"8", "-1", "10"}},
          {R"({"type": "integer", "multipleOf": 5, "minimum": 3, "maximum": 12})",
           {"5", "10"},
           {"0", "15", "3"}},
          {R"({"type": "string", "minLength": 1, "maxLength": 2})",
           {R"("a")", R"("ab")", R"("\n")", R"("é")", R"("\u00e9x")", R"("\ud83d\ude00😀")"},
           {R"("")", R"("abc")", R"("\ud83d")", R"("\ud83d\ude00😀a")"}},
          {R"({"type": "string", "pattern": "b+$"})",
           {R"("b")", R"("a\nb")", R"("\"bb")"},
           {R"("ba")", R"("")"}},
          {R"({"type": "string", "pattern": "^[^a]$"})",
           {R"("b")", R"("\"")", R"("\\")"},
           {R"("a")", R"("""  )"}},
          {R"({"type": "string", "format": "date"})",
           {R"("2024-02-29")", R"("2000-12-31")"},
           {R"("2023-02-29")", R"("1900-02-29")", R"("2024-13-01")", R"("0000-01-01")"}},
          // Pydantic writes HttpUrl so, with a larger length.
          {R"({"type": "string", "format": "uri", "minLength": 1, "maxLength": 12})",
           {R"("http://a/b")"},
           {R"("")", R"("http://a/bcde")"}},
          {R"({"type": "string", "format": "uuid", "minLength": 1, "maxLength": 36})",
           {R"("123e4567-e89b-12d3-a456-426614174000")"},
           {R"("123e4567")"}},
          {R"({"type": "string", "format": "binary"})", {R"("x")"}, {"1"}},
          {R"({"type": "string", "format": "path", "maxLength": 2})", {R"("/a")"}, {R"("/ab")"}},
          {R"({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2})",
           {"[1]", "[1, 2]", "[1,2]", "[ 1 ]"},
           {"[]", "[1,2,3]", "[\"a\"]", "[1,]", "[\n1]"}},
          {R"({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "items": false})",
           {"[]", "[1]", "[1,null]"},
           {"[null]", "[1,null,1]"}},
          {R"({"type": "object", "properties": {"a": {"type": "integer"}, "b": true}, "required": ["b"], "additionalProperties": false})",
           {R"({"b":1})", R"({"a": 1, "b": "x"})"},
           {R"({})", R"({"a":1})", R"({"a":"x","b":1})", R"({"b":1,"c":2})"}},
          {R"({"type": "object", "properties": {"ab": {"type": "integer"}}})",
           {R"({})", R"({"ab":1})", R"({"a":"x"})", R"({"abc":"x"})", R"({"ab":1,"z":[]})"},
           {R"({"ab":"x"})", R"({"z":1,"ab":"x"})", R"({"ab":1,"ab":"x"})", R"({"\u0061b":"x"})"}},
          {R"({"type": "object", "minProperties": 1, "maxProperties": 2, "properties": {"a": true, "b": true, "c": true}, "additionalProperties": false})",
           {R"({"a":1})", R"({"a":1,"c":1})", R"({"b":1})"},
           {R"({})", R"({"a":1,"b":1,"c":1})"}},
          {R"({"enum": [1, "one", {"a": [true, null]}, 2.5]})",
           {"1", "\"one\"", R"({"a":[true,null]})", "2.5"},
           {"2", "\"on\"", R"({"a":[true]})"}},
          {R"({"enum": ["größe"]})", {R"("größe")"}, {R"("grö෾")"}},
          {R"({"anyOf": [{"type": "string"}, {"type": "integer"}], "minimum": 3})",
           {"\"x\"", "3"},
           {"2", "null"}},
          {R"({"allOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"a": {"minimum": 5}}}], "type": "object", "additionalProperties": true})",
           {R"({"a":5})", "{}"},
           {R"({"a":4})", R"({"a":"x"})"}},
          {R"({"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "additionalProperties": false}}, "$ref": "#/$defs/n"})",
           {"{}", R"({"n":{"n":{}}})"},
           {R"({"n":1})", R"({"m":{}})"}}}) {
    for (const std::string& instance : valid)
      EXPECT_TRUE(takes(schema(text), instance)) << text << " " << instance;
    for (const std::string& instance : invalid)
      EXPECT_FALSE(takes(schema(text), instance)) << text << " " << instance;
  }
}

TEST_F(Compiled, BlanksBetweenValuesAreBounded) {
  for (
      const StructuredOutputs& asked :
      {schema(
           R"({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}})"),
       StructuredOutputs{.json_object = true}}) {
    const auto json = [](const std::string& blanks) {
      return "{" + blanks + "\"a\":" + blanks + "[1," + blanks + "2]" + blanks + "}";
    };
    for (const char* blanks : {"", " "}) EXPECT_TRUE(takes(asked, json(blanks))) << blanks;
    for (const char* blanks : {"  ", "\n", "\t"})
      EXPECT_FALSE(takes(asked, json(blanks))) << blanks;
  }
}

// The patterns are those of Zod 4's z.uuid() and z.iso.date().
TEST_F(Compiled, APatternBesideAFormatDecides) {
  const auto schema = [](const char* format, const std::string& pattern) {
    return StructuredOutputs{
        .json =
            nlohmann::json{{"type", "string"}, {"format", format}, {"pattern", pattern}}.dump()};
  };
  const auto uuid = schema(
      "uuid",
      "^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}|"
      "00000000-0000-0000-0000-000000000000|ffffffff-ffff-ffff-ffff-ffffffffffff)$");
  EXPECT_TRUE(takes(uuid, R"("123e4567-e89b-12d3-a456-426614174000")"));
  EXPECT_FALSE(takes(uuid, R"("123e4567-e89b-02d3-a456-426614174000")"));
  const auto date = schema(
      "date",
      R"(^(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|)"
      R"(\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|)"
      R"((?:02)-(?:0[1-9]|1\d|2[0-8])))$)");
  EXPECT_TRUE(takes(date, R"("2024-02-29")"));
  EXPECT_FALSE(takes(date, R"("2023-02-29")"));
  EXPECT_TRUE(takes(schema("cuid", "^c[0-9a-z]{4}$"), R"("c0abc")"));
}

// std::regex says which texts the patterns of Zod 4's z.email() and Pydantic 2.12's Decimal match.
TEST_F(Compiled, KnownPatternsThatLookAroundAreEnforced) {
  for (
      const std::string pattern :
      {R"(^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$)",
       R"(^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$)"}) {
    const StructuredOutputs asked = {
        .json = nlohmann::json{{"type", "string"}, {"pattern", pattern}}.dump()};
    int num_matches = 0;
    for (const std::string text : {"a@b.co",    "first.last+x@a-b.c-.example",
                                   "o'x@b.co",  "a'@b.co",
                                   ".a@b.co",   "a.@b.co",
                                   "a..b@c.de", "a.b.c@d.ef",
                                   "a@b",       "a@b.c",
                                   "a@-b.co",   "a@b..co",
                                   "@b.co",     "'.a@b.co",
                                   "a@b.c1",    "1",
                                   "-1.5",      "+.5",
                                   "5.",        ".",
                                   "-",         "",
                                   "1.2.3",     "+-1",
                                   "00.10",     "1e5"}) {
      const bool expected = std::regex_match(text, std::regex(pattern));
      EXPECT_EQ(takes(asked, '"' + (text + '"')), expected) << pattern << " " << text;
      num_matches += expected;
    }
    EXPECT_GE(num_matches, 5) << pattern;
  }
}

TEST_F(Compiled, EveryKindOfStructureMakesMasks) {
  EXPECT_TRUE(takes({.regex = "ab?c"}, "ac"));
  EXPECT_FALSE(takes({.regex = "ab?c"}, "abbc"));
  EXPECT_TRUE(takes({.choice = {"ab", "abc"}}, "ab"));
  EXPECT_FALSE(takes({.choice = {"ab", "abc"}}, "a"));
  EXPECT_TRUE(takes({.grammar = "root ::= \"x\" y{2}\ny ::= [0-9]"}, "x12"));
  EXPECT_FALSE(takes({.grammar = "root ::= \"x\" y{2}\ny ::= [0-9]"}, "x1"));
  EXPECT_TRUE(takes({.json_object = true}, R"({"a": [1, {"b": null}]})"));
  EXPECT_FALSE(takes({.json_object = true}, "[1]"));
  const StructuredOutputs tag{
      .structural_tag =
          R"({"format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [{"type": "tag", "begin": "<f=a>",
          "content": {"type": "json_schema", "json_schema": {"type": "integer"}}, "end": "</f>"}]}})"};
  EXPECT_TRUE(takes(tag, "free text <f=a>12</f> and more"));
  EXPECT_TRUE(takes(tag, "nothing"));
  EXPECT_FALSE(takes(tag, "free text <f=a>x</f>"));
  EXPECT_FALSE(takes(tag, "free text <f=b>"));
}

// Bytes of a surrogate are decoded as three characters that no class named (RFC 3629, section 3).
TEST_F(Compiled, ClassesOfCharactersHaveNoSurrogates) {
  for (const char* rule : {"root ::= [^\\n\"]", "root ::= [a-\\uffff]", "root ::= [^a]+"}) {
    for (const char* text : {"\u00e9", "\ud7ff", "\ue000"})
      EXPECT_TRUE(takes({.grammar = rule}, text)) << rule << ' ' << text;
    for (const char* bytes : {"\xed\xa0\x80", "\xed\xbf\xbf"})
      EXPECT_FALSE(takes({.grammar = rule}, bytes)) << rule;
  }
}

TEST_F(Compiled, ExactlyOneStructureMayBeAskedFor) {
  EXPECT_NE(refusal({.json_object = true, .regex = "a"}).find("must be one"), std::string::npos);
  EXPECT_EQ(rig_.compile({}), nullptr);
}

TEST_F(Compiled, WhatXGrammarRefusesComesBackAsItsReason) {
  EXPECT_NE(refusal({.grammar = "root ::= other"}).find("structured_outputs: "), std::string::npos);
  EXPECT_NE(refusal({.grammar = "start ::= \"a\""}), "");
  EXPECT_TRUE(takes({.regex = "a"}, "a"));  // the helper goes on
}

TEST_F(Compiled, TheSameStructureIsCompiledOnce) {
  const auto first = rig_.compile({.regex = "abc"});
  EXPECT_EQ(rig_.compile({.regex = "abc"}), first);
  EXPECT_NE(rig_.compile({.regex = "abd"}), first);
}

TEST_F(Compiled, AfterReasoningTheTextMayBeginWithLineEnds) {
  StructuredOutputs asked{.regex = "ab", .reasoning_end = "</t>"};
  EXPECT_TRUE(takes(asked, "thinking</t>\n\nab"));
  EXPECT_TRUE(takes(asked, "</t>ab"));
  EXPECT_FALSE(takes(asked, "ab"));
  EXPECT_FALSE(takes(asked, "</t>x"));
}

TEST_F(Compiled, SeveralThreadsMayCompileAtOnce) {
  std::vector<std::thread> threads;
  std::vector<int> done(6, 0);
  for (size_t i = 0; i < done.size(); ++i)
    threads.emplace_back(
        [&, i] { done[i] = rig_.compile({.regex = "t" + std::to_string(i)}) != nullptr; });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(done, std::vector<int>(6, 1));
}

// A busy machine gives a helper little of a processor, and refuses nothing for it.
TEST_F(Compiled, AHelperThatHasToWaitForAProcessorIsWaitedFor) {
  ASSERT_NE(rig_.compile({.regex = "a"}), nullptr);
  const std::vector<pid_t> helpers = child_processes();
  ASSERT_FALSE(helpers.empty());
  for (const pid_t helper : helpers) ASSERT_EQ(::kill(helper, SIGSTOP), 0);
  const std::jthread later([&] {
    std::this_thread::sleep_for(std::chrono::duration<double>(kMaxCompileSeconds + 0.5));
    for (const pid_t helper : helpers) ::kill(helper, SIGCONT);
  });
  EXPECT_TRUE(takes({.regex = "b"}, "b"));
}

// As where the system ran out of memory meanwhile.
TEST_F(Compiled, AHelperThatEndedWhileItHadNothingToDoIsReplaced) {
  ASSERT_NE(rig_.compile({.regex = "a"}), nullptr);
  for (const pid_t helper : child_processes()) {
    ASSERT_EQ(::kill(helper, SIGKILL), 0);
    siginfo_t ended{};
    ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(helper), &ended, WEXITED | WNOWAIT), 0);
  }
  EXPECT_TRUE(takes({.regex = "b"}, "b"));
}

// Ambiguity makes the parser's work grow with the square of the text.
TEST_F(Compiled, AMaskThatTakesTooLongEndsInAnErrorWithTheLimitsName) {
  // Every rule can be every other one, and nothing: a text of n letters has very many readings.
  std::string rules = "root ::= r0\n";
  for (int i = 0; i < 40; ++i)
    rules += fmt::format("r{} ::= r{} r{} | r0 r{} | \"x\" | \"\"\n", i, (i + 1) % 40,
                         (7 * i + 3) % 40, (i + 11) % 40);
  const auto grammar = rig_.compile({.grammar = rules});
  const auto matcher = grammar->new_matcher();
  std::vector<uint32_t> mask((GrammarRig::kVocabSize + 31) / 32);
  try {
    for (int i = 0; i < 300; ++i) {
      matcher->fill_mask(mask);
      ASSERT_TRUE(matcher->accept('x'));
    }
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("kMaxMaskSteps"), std::string::npos);
    return;
  }
  FAIL() << "300 masks were made";
}

}  // namespace
}  // namespace nanovllm
