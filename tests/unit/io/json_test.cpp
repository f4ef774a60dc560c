// parse_json: accepts RFC 8259 and nothing else, within limits; every refusal is one line with the
// place.
#include "io/json.h"

#include <fstream>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sys/stat.h>

#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

Json parse(std::string_view text, const JsonLimits& limits = {}) {
  return parse_json(text, "a.json", ErrorKind::invalid_argument, limits);
}

std::string refusal(std::string_view text, const JsonLimits& limits = {}) {
  try {
    parse(text, limits);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    return error.what();
  }
  return "accepted";
}

void expect_refused(std::string_view text, std::string_view part) {
  const std::string message = refusal(text);
  EXPECT_EQ(message.find("a.json: "), 0u) << message;
  EXPECT_NE(message.find(part), std::string::npos) << message;
}

TEST(Json, ParsesEveryKindOfValueAndKeepsTheOrderOfKeys) {
  const Json json = parse(
      R"( {"z": [1, -2, 3.5, 1e3], "a": {"t": true, "f": false, "n": null}, "s": "\u00e9\n"} )");
  EXPECT_EQ(json.dump(), R"({"z":[1,-2,3.5,1000.0],"a":{"t":true,"f":false,"n":null},"s":"é\n"})");
  EXPECT_EQ(parse("[]"), Json::array());
  EXPECT_EQ(parse("{}"), Json::object());
  EXPECT_EQ(parse("7"), Json(7));
  EXPECT_EQ(parse("[[],{},[[]]]").dump(), "[[],{},[[]]]");
  EXPECT_EQ(parse(R"({"a":{"b":{"c":[]},"d":1},"e":2})").dump(),
            R"({"a":{"b":{"c":[]},"d":1},"e":2})");
}

TEST(Json, AcceptsAByteOrderMark) { EXPECT_EQ(parse("\xEF\xBB\xBF{\"a\":1}").at("a"), 1); }

TEST(Json, TellsIntegersFromFloats) {
  EXPECT_TRUE(parse("18446744073709551615").is_number_unsigned());
  EXPECT_TRUE(parse("-9223372036854775808").is_number_integer());
  EXPECT_TRUE(parse("18446744073709551616").is_number_float());
  EXPECT_TRUE(parse("1.0").is_number_float());
}

TEST(Json, RefusesWhatRfc8259DoesNotAllow) {
  for (const char* text :
       {"",         " ",         "{",       "[1,]",        "{\"a\":1,}",   "{a:1}",    "{'a':1}",
        "[1 2]",    "01",        "+1",      "1.",          ".5",           "0x10",     "NaN",
        "Infinity", "-Infinity", "nul",     "True",        "// c\n1",      "/* c */1", "[1] x",
        "1 2",      "\"\t\"",    "\"\\x\"", "\"\\ud800\"", "\"\\udc00x\"", "\"open",   "]",
        "1e999"})
    expect_refused(text, "not valid JSON at byte");
}

TEST(Json, NamesTheByteWhereItWentWrong) {
  expect_refused("[1, 2, x]", "at byte 7");
  expect_refused("{\"a\": tru}", "at byte 9");
}

TEST(Json, RefusesAZeroByteAndWhatFollowsIt) {
  expect_refused(std::string_view("{}\0{}", 5), "byte 2: zero byte");
}

TEST(Json, RefusesInvalidUtf8) {
  for (const char* bytes :
       {"\xff", "\xc0\xaf", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xe2\x82", "\x80"})
    expect_refused(std::string("\"") + bytes + "\"", "not valid JSON at byte");
}

TEST(Json, RefusesDuplicateKeysAtAnyLevel) {
  expect_refused(R"({"a":1,"b":2,"a":3})", "duplicate key \"a\" in a JSON object (at byte 15)");
  expect_refused(R"({"o":[{"k":1,"k":1}]})", "duplicate key \"k\"");
  expect_refused(R"({"a":1,"\u0061":2})", "duplicate key \"a\"");
  EXPECT_EQ(refusal(R"({"a":{"a":{"a":1}},"b":{"a":1}})"), "accepted");
}

TEST(Json, RefusesMoreLevelsValuesOrBytesThanTheLimits) {
  EXPECT_EQ(refusal(std::string(64, '[') + std::string(64, ']')), "accepted");
  expect_refused(std::string(65, '[') + std::string(65, ']'),
                 "nested more than 64 levels deep (at byte 64)");
  expect_refused(std::string(1'000'000, '['), "nested more than 64");
  EXPECT_EQ(refusal("[1,2]", {.max_nodes = 3}), "accepted");
  EXPECT_NE(refusal("[1,2,3]", {.max_nodes = 3}).find("more than 3 JSON values"),
            std::string::npos);
  EXPECT_NE(refusal("[1,2,3]", {.max_bytes = 6}).find("7 bytes of JSON, more than the limit of 6"),
            std::string::npos);
}

TEST(Json, AnErrorNeverQuotesMoreThanALineOfTheInput) {
  EXPECT_LT(refusal("[" + std::string(100'000, 'x')).size(), 400u);
  EXPECT_LT(refusal("[\"" + std::string(100'000, '\x01')).size(), 400u);
  const std::string key(100'000, 'k');
  EXPECT_LT(refusal("{\"" + key + "\":1,\"" + key + "\":2}").size(), 400u);
}

TEST(Json, ManyKeysAreReadInFarLessThanQuadraticTime) {
  std::string text = "{";
  for (int i = 0; i < 300'000; ++i)
    text += (i ? ",\"key" : "\"key") + std::to_string(i) + "\":" + std::to_string(i);
  const Json json = parse(text + "}");
  EXPECT_EQ(json.size(), 300'000u);
  EXPECT_EQ(std::prev(json.end()).key(), "key299999");
}

TEST(Json, QuoteMakesOnePrintableLineOfAnyBytes) {
  EXPECT_EQ(quote("a\"b"), R"("a\"b")");
  EXPECT_EQ(quote("\xff\n"), "\"\\ufffd\\n\"");
  EXPECT_LT(quote(std::string(1000, 'x')).size(), 100u);
}

TEST(ReadFile, NamesThePathAndTheReason) {
  const TempDirectory temp;
  const auto& directory = temp.path();
  const auto message = [](const std::string& path) -> std::string {
    try {
      read_json_file(path);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::model);
      return error.what();
    }
    return "accepted";
  };
  const std::string missing = directory / "missing.json", file = directory / "file.json",
                    pipe = directory / "pipe";
  EXPECT_EQ(message(missing), missing + ": cannot be read: No such file or directory");
  EXPECT_EQ(message(directory), directory.string() + ": is a directory, expected a file");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(message(pipe), pipe + ": is not a regular file");
  std::ofstream(file) << "{\"a\": 1}";
  EXPECT_EQ(read_json_file(file).at("a"), 1);
  std::ofstream(file) << "{\"a\": }";
  EXPECT_EQ(message(file).find(file + ": not valid JSON at byte 6"), 0u) << message(file);
  EXPECT_THROW(read_file(file, 3), Error);
}

}  // namespace
}  // namespace nanovllm
