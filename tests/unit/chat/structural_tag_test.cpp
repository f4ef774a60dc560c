// Structural tags: text that each family's template writes for a call is what its tag allows.
#include "chat/structural_tag.h"

#include "parse_rig.h"

namespace nanovllm {
namespace {

const char* const kSchema =
    R"({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]})";

Json tag_of(const std::string& parser, ToolChoice::Kind kind, bool parallel = true,
            const std::string& chat_template = "") {
  const std::vector<Tool> tools = {{.name = "f", .parameters = kSchema}, {.name = "g"}};
  const std::string tag =
      structural_tag(choose_chat_format(chat_template, parser, "none"),
                     {.tools = tools, .choice = {kind, "f"}, .parallel = parallel});
  return tag.empty() ? Json() : Json::parse(tag);
}

TEST(StructuralTag, OfAutomaticCallsFollowsTheMark) {
  EXPECT_EQ(tag_of("hermes", ToolChoice::automatic),
            Json::parse(R"({"type": "structural_tag", "format": {
    "type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [
      {"type": "tag", "begin": "<tool_call>\n{\"name\": \"f\", \"arguments\": ",
       "content": {"type": "json_schema", "json_schema": )" +
                        std::string(kSchema) + R"(}, "end": "}\n</tool_call>"},
      {"type": "tag", "begin": "<tool_call>\n{\"name\": \"g\", \"arguments\": ",
       "content": {"type": "json_schema", "json_schema": {"type": "object", "additionalProperties": false}}, "end": "}\n</tool_call>"}],
    "at_least_one": false, "stop_after_first": false}})"));
  const Json llama = tag_of("llama3_json", ToolChoice::automatic)["format"];
  EXPECT_EQ(llama["triggers"],
            Json::parse(
                R"(["{\"name\": \"f\", \"parameters\": ", "{\"name\": \"g\", \"parameters\": "])"));
  const Json list = tag_of("mistral", ToolChoice::automatic, true, "[TOOL_CALLS]")["format"];
  EXPECT_EQ(list["tags"][0]["begin"], "[TOOL_CALLS][");
  EXPECT_EQ(list["tags"][0]["content"]["separator"], ", ");
  EXPECT_EQ(tag_of("mistral", ToolChoice::automatic, true,
                   "[TOOL_CALLS] [ARGS]")["format"]["tags"][1]["begin"],
            "[TOOL_CALLS]g[ARGS]");
  EXPECT_TRUE(tag_of("pythonic", ToolChoice::automatic).is_null());
}

TEST(StructuralTag, OfRequiredCallsLeavesNothingElse) {
  const Json required = tag_of("hermes", ToolChoice::required, false)["format"];
  EXPECT_EQ(required["type"], "tags_with_separator");
  EXPECT_EQ(required["tags"].size(), 2u);
  EXPECT_EQ(required["at_least_one"], true);
  EXPECT_EQ(required["stop_after_first"], true);
  const Json named = tag_of("hermes", ToolChoice::named)["format"];
  EXPECT_EQ(named["tags"].size(), 1u);
  EXPECT_EQ(named["stop_after_first"], true);
  EXPECT_EQ(
      tag_of("pythonic", ToolChoice::named)["format"],
      Json::parse(
          R"json({"type": "tag", "begin": "[", "content": {"type": "tags_with_separator", "tags": [
      {"type": "tag", "begin": "f(", "content": {"type": "sequence", "elements": [
        {"type": "sequence", "elements": [{"type": "const_string", "value": "city="}, {"type": "json_schema", "json_schema": {"type": "string"}}]},
        {"type": "optional", "content": {"type": "sequence", "elements": [
          {"type": "const_string", "value": ", days="}, {"type": "json_schema", "json_schema": {"type": "integer"}}]}}]}, "end": ")"}],
      "separator": ", ", "at_least_one": true, "stop_after_first": true}, "end": "]"})json"));
  const Json coder = tag_of("qwen3_coder", ToolChoice::named)["format"]["tags"][0];
  EXPECT_EQ(coder["begin"], "<tool_call>\n<function=f>\n");
  EXPECT_EQ(coder["content"]["elements"][0]["begin"], "<parameter=city>\n");
  EXPECT_EQ(coder["content"]["elements"][0]["content"]["type"], "any_text");
  EXPECT_EQ(coder["content"]["elements"][1]["content"]["end"], "\n</parameter>\n");
}

// As OpenAI's reference has it: omitting parameters defines an empty list of them; vLLM reads {}
// so.
TEST(StructuralTag, AToolWithoutParametersTakesNone) {
  for (const char* parameters : {"", "{}"}) {
    const std::vector<Tool> tools = {{.name = "f", .parameters = parameters}};
    const Json tag = Json::parse(structural_tag(format_named("hermes"), {.tools = tools}));
    EXPECT_EQ(tag["format"]["tags"][0]["content"]["json_schema"],
              Json::parse(R"({"type": "object", "additionalProperties": false})"));
  }
}

// Its reader takes quotes around one for a part of it, as Qwen's own does.
TEST(StructuralTag, AStringOfQwenCoderIsBareHoweverItsSchemaNamesIt) {
  const auto content_of = [](const std::string& property, bool strict = false) {
    const std::vector<Tool> tools = {
        {.name = "f",
         .parameters = R"({"$defs": {"color": {"enum": ["red", "blue"], "type": "string"}},
                           "properties": {"a": )" +
                       property + "}}",
         .strict = strict}};
    return Json::parse(structural_tag(
        format_named("qwen3_coder"),
        {.tools = tools,
         .choice = {ToolChoice::required,
                    ""}}))["format"]["tags"][0]["content"]["elements"][0]["content"]["content"];
  };
  const Json text = {{"type", "any_text"}};
  const std::string colors = R"({"type": "const_string", "value": "red"},
                                {"type": "const_string", "value": "blue"})";
  const Json color = Json::parse(R"({"type": "or", "elements": [)" + colors + "]}");
  for (const bool strict : {false, true}) {
    for (const char* any : {R"({"anyOf": [{"type": "string"}, {"type": "null"}]})",
                            R"({"type": ["string", "null"]})", "{}", "true"})
      EXPECT_EQ(content_of(any, strict), text) << any;
    for (const char* one : {R"({"$ref": "#/$defs/color"})", R"({"enum": ["red", "blue"]})",
                            R"({"allOf": [{"$ref": "#/$defs/color"}], "description": "one"})"})
      EXPECT_EQ(content_of(one, strict), color) << one;
  }
  EXPECT_EQ(content_of(R"({"const": "red"})", true)["elements"][0]["value"], "red");
  EXPECT_EQ(content_of(R"({"enum": ["red", null]})")["elements"][1]["value"], "null");
  const Json maybe =
      content_of(R"({"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}]})", true);
  EXPECT_EQ(maybe["elements"][0], color);
  EXPECT_EQ(maybe["elements"][1]["json_schema"]["type"], "null");
  EXPECT_EQ(content_of(R"({"type": "integer"})")["type"], "json_schema");
}

TEST(StructuralTag, ReasoningMayComeFirst) {
  const std::vector<Tool> tools = {{.name = "f"}};
  const ChatFormat format = choose_chat_format("", "hermes", "qwen3");
  const Json free =
      Json::parse(structural_tag(format, {.tools = tools, .may_reason = true}))["format"];
  const Json block = free["elements"][0]["content"]["elements"];
  EXPECT_EQ(block[0]["begin"], "<think>");
  EXPECT_EQ(block[1]["content"]["value"], "\n\n");  // behind it alone
  EXPECT_EQ(free["elements"][1]["type"], "triggered_tags");
  const Json after = Json::parse(structural_tag(
      format,
      {.tools = tools, .choice = {ToolChoice::required, ""}, .after_reasoning = true}))["format"];
  EXPECT_EQ(after["elements"][0]["content"]["value"], "\n\n");
}

TEST(StructuralTag, AStrictToolThatCannotBeForcedIsRefused) {
  const auto refused = [](const char* parser, const Tool& tool, ToolChoice::Kind kind) {
    const std::vector<Tool> tools = {tool};
    try {
      structural_tag(format_named(parser), {.tools = tools, .choice = {kind, ""}});
      return std::string();
    } catch (const Error& error) {
      return std::string(error.what());
    }
  };
  const Tool strict{.name = "f",
                    .parameters = R"({"properties": {"a": {"type": "string", "pattern": "x"}}})",
                    .strict = true};
  EXPECT_NE(
      refused("qwen3_coder", strict, ToolChoice::required).find("the pattern of its argument"),
      std::string::npos);
  EXPECT_NE(refused("pythonic", strict, ToolChoice::automatic).find("no mark shows"),
            std::string::npos);
  EXPECT_EQ(refused("pythonic", strict, ToolChoice::required), "");
  EXPECT_EQ(refused("hermes", strict, ToolChoice::automatic), "");
}

}  // namespace
}  // namespace nanovllm
