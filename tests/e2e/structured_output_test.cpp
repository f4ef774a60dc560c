// generate with a structure: models/demo knows none of them, so what the answers are, a grammar
// made them.
#include <filesystem>
#include <set>

#include <nlohmann/json.hpp>

#include "e2e/generate.h"
#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

class StructuredOutput : public testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(NANOVLLM_BINARY_DIR "/bin/libnanovllm-grammar.so"))
      GTEST_SKIP() << "built without the grammar module";
  }
  std::string file(const std::string& text) {
    const std::string path = directory_.path() / "structure";
    write_file(path, text);
    return path;
  }
  /// Answers to one prompt at a temperature where a model without a grammar says anything.
  static std::vector<std::string> texts(const Arguments& structure) {
    const Json params = {{"temperature", 3}, {"seed", 4}, {"n", 8}, {"max_tokens", 300}};
    const Json request = {{"prompt", "23 + 58 ="}, {"sampling_params", params}};
    std::vector<std::string> texts;
    for (const Json& line : answers(request.dump() + "\n", structure))
      for (const Json& answer : line.at("outputs"))
        if (answer.at("finish_reason") == "stop") texts.push_back(answer.at("text"));
    EXPECT_FALSE(texts.empty());
    return texts;
  }
  static std::string refusal(Arguments structure, int exit_code) {
    structure.insert(structure.end(), {"--prompt", "x", "--max-tokens", "2"});
    const ProcessResult result = nanovllm_program(generate(structure));
    EXPECT_EQ(result.exit_code, exit_code) << result.errors;
    EXPECT_EQ(result.output, "");
    EXPECT_EQ(std::count(result.errors.begin(), result.errors.end(), '\n'), 1) << result.errors;
    return result.errors;
  }
  TempDirectory directory_;
};

TEST_F(StructuredOutput, OfASchemaIsJsonThatItDescribes) {
  const std::string schema = file(
      R"({"type": "object", "properties": {"sum": {"type": "integer", "minimum": 10, "maximum": 99},
          "ok": {"type": "boolean"}}, "required": ["sum", "ok"], "additionalProperties": false})");
  for (const std::string& text : texts({"--json-schema", schema})) {
    const Json value = Json::parse(text, nullptr, false);
    ASSERT_TRUE(value.is_object() && value.size() == 2) << text;
    EXPECT_TRUE(value["sum"].is_number_integer() && value["ok"].is_boolean()) << text;
    EXPECT_TRUE(value["sum"] >= 10 && value["sum"] <= 99) << text;
  }
}

TEST_F(StructuredOutput, OfARegularExpressionAChoiceOrAGrammarIsOneOfItsTexts) {
  for (const std::string& text : texts({"--regex", "[ab]{3}-\\d"})) {
    ASSERT_EQ(text.size(), 5u) << text;
    EXPECT_EQ(text.find_first_not_of("ab"), 3u) << text;
    EXPECT_TRUE(text[3] == '-' && std::isdigit(static_cast<unsigned char>(text[4]))) << text;
  }
  std::set<std::string> chosen;
  for (const std::string& text :
       texts({"--choice", "yes", "--choice", "no", "--choice", "\u00e9t\u00e9"}))
    chosen.insert(text);
  for (const std::string& text : chosen)
    EXPECT_TRUE(text == "yes" || text == "no" || text == "\u00e9t\u00e9") << text;
  EXPECT_GT(chosen.size(), 1u);
  for (const std::string& text :
       texts({"--grammar", file("root ::= \"<\" (\"a\" | root){1,2} \">\"\n")})) {
    EXPECT_EQ(text.find_first_not_of("<a>"), text.npos) << text;
    EXPECT_EQ(std::ranges::count(text, '<'), std::ranges::count(text, '>')) << text;
  }
}

// The harness gives standard input by a pipe, as <(command) of a shell is one.
TEST_F(StructuredOutput, MayComeByAPipe) {
  ProcessOptions options;
  options.input = "root ::= \"yes\"";
  const Arguments arguments = generate({"--prompt", "x", "--grammar", "/dev/stdin", "--json"});
  const ProcessResult result = nanovllm_program(arguments, options);
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_EQ(result.lines().at(0)["text"], "yes");
  options.input.assign((size_t{1} << 20) + 1, ' ');
  const ProcessResult large = nanovllm_program(arguments, options);
  EXPECT_EQ(large.exit_code, 2);
  EXPECT_NE(large.errors.find("more than the limit of 1048576 bytes"), std::string::npos)
      << large.errors;
}

TEST_F(StructuredOutput, ThatCannotBeEnforcedIsRefusedByName) {
  EXPECT_NE(refusal({"--json-schema", file(R"({"type": "object", "not": {}})")}, 1).find("#/not"),
            std::string::npos);
  EXPECT_NE(refusal({"--regex", "(?=a)b"}, 1).find("looks around"), std::string::npos);
  EXPECT_NE(refusal({"--grammar", file("root ::= (")}, 1).find("("), std::string::npos);
  EXPECT_NE(refusal({"--regex", "a", "--choice", "b"}, 1).find("must be one"), std::string::npos);
}

TEST_F(StructuredOutput, ThatIsEmptyIsNotTakenForNone) {
  EXPECT_NE(refusal({"--json-schema", file("")}, 2).find("is empty"), std::string::npos);
  EXPECT_NE(refusal({"--grammar", file("")}, 2).find("is empty"), std::string::npos);
  EXPECT_NE(refusal({"--regex", ""}, 2).find("must not be empty"), std::string::npos);
}

}  // namespace
}  // namespace nanovllm
