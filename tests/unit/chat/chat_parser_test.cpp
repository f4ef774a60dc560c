// Answers with reasoning and calls, good and broken, whole and cut.
#include "chat/chat_parser.h"

#include <algorithm>
#include <cstdlib>

#include "parse_rig.h"

namespace nanovllm {
namespace {

ChatMessage read(const std::string& parser, const std::string& text, std::vector<Tool> tools) {
  return parse_everywhere(format_named(parser), {.tools = std::move(tools), .id_seed = 3}, text);
}

/// "name(arguments) ..." of the calls, then what is left as content.
std::string shown(const std::string& parser, const std::string& text,
                  std::vector<Tool> tools = tools_named({"f", "g"})) {
  const ChatMessage message = read(parser, text, std::move(tools));
  std::string out;
  for (const ToolCall& call : message.tool_calls) out += call.name + call.arguments + " ";
  return out + "|" + message.content;
}

TEST(HermesCalls, ContentStaysAndWhiteSpaceAroundCallsGoes) {
  EXPECT_EQ(shown("hermes",
                  "Let me see.\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n"
                  "</tool_call>\n<tool_call>{\"arguments\":{},\"name\":\"g\"}</tool_call>\n"),
            "f{\"a\": 1} g{} |Let me see.");
  EXPECT_EQ(shown("hermes", "a \n<tool_call>{\"name\": \"f\"}</tool_call>b"), "f{} |ab");
  EXPECT_EQ(shown("hermes", "no call < tool_call >\n "), "|no call < tool_call >\n ");
}

TEST(HermesCalls, AnEndMarkMayBeMissingAndACallWithoutArgumentsHasNone) {
  EXPECT_EQ(shown("hermes", "<tool_call>{\"name\": \"f\"}"), "f{} |");
  EXPECT_EQ(shown("hermes", "<tool_call>{\"name\": \"f\", \"x\": 5, \"y\": [1]}</tool_call> so"),
            "f{} | so");
}

// As max_tokens does.
TEST(HermesCalls, AnEndMarkMayBeCut) {
  const std::string call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n",
                    mark = "</tool_call>";
  for (size_t n = 0; n <= mark.size(); ++n)
    EXPECT_EQ(shown("hermes", call + mark.substr(0, n)), "f{\"a\": 1} |") << n;
}

TEST(HermesCalls, WhatDoesNotParseIsText) {
  for (const char* text :
       {"<tool_call>", "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": ", "<tool_call> f(1)",
        "<tool_call>{\"name\": 5, \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": \"{}\"}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 01}}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"\\ud800\"}}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"\\udc00\"}}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"\\ud800\\ud800\"}}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": {}, \"arguments\": {}}</tool_call>"}) {
    ChatParserOptions options{.tools = tools_named({"f"}), .whole_calls = true};
    const ChatMessage message = parse(format_named("hermes"), options, {text});
    EXPECT_EQ(message.content, text);
    EXPECT_TRUE(message.tool_calls.empty()) << text;
  }
  // A good call behind a broken one is found.
  EXPECT_EQ(shown("hermes", "<tool_call>{oops <tool_call>{\"name\": \"f\"}</tool_call>"),
            "f{} |<tool_call>{oops");
}

TEST(HermesCalls, AStreamGivesArgumentsAsTheyComeAndTheRestOfABrokenCallAsText) {
  ChatParser parser(format_named("hermes"), {.tools = tools_named({"f"})});
  ChatDelta delta = parser.add("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\"");
  ASSERT_EQ(delta.tool_calls.size(), 2u);
  EXPECT_EQ(delta.tool_calls[0].name, "f");
  EXPECT_TRUE(delta.tool_calls[0].id.starts_with("call_"));
  EXPECT_EQ(delta.tool_calls[1].arguments, "{\"a\"");
  delta = parser.add(": [1, ");
  ASSERT_EQ(delta.tool_calls.size(), 1u);
  EXPECT_EQ(delta.tool_calls[0].arguments, ": [1, ");
  delta = parser.add("oops");
  EXPECT_EQ(delta.content, "oops");
  EXPECT_TRUE(parser.finish().empty());
}

TEST(ChatParser, WithoutToolsMarksAreText) {
  const std::string text = " <tool_call>{\"name\": \"f\"}</tool_call> ";
  EXPECT_EQ(shown("hermes", text, {}), "|" + text);
  EXPECT_EQ(shown("none", text), "|" + text);
}

TEST(QwenCoderCalls, ValuesHaveTheTypesOfTheSchema) {
  const std::vector<Tool> tools = {{.name = "f", .parameters = R"({"type": "object",
      "$defs": {"color": {"enum": ["red", "1"]}},
      "properties": {"s": {"type": "string"}, "i": {"type": "integer"}, "n": {"type": ["number", "null"]},
                     "b": {"type": "boolean"}, "o": {"type": "object"}, "any": {}, "c": {"$ref": "#/$defs/color"},
                     "all": {"allOf": [{"$ref": "#/$defs/color"}], "description": "one"},
                     "u": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
                     "f": {"type": "float"}, "d": {"type": "dict"}, "str": {"type": "str"}}})"}};
  const auto call = [&](const std::string& key, const std::string& value) {
    return shown("qwen3_coder",
                 "<tool_call>\n<function=f>\n<parameter=" + key + ">\n" + value +
                     "\n</parameter>\n</function>\n</tool_call>",
                 tools);
  };
  EXPECT_EQ(call("s", "12"), "f{\"s\": \"12\"} |");
  EXPECT_EQ(call("s", "\"a\"\n</param\n"), "f{\"s\": \"\\\"a\\\"\\n</param\\n\"} |");
  EXPECT_EQ(call("i", "12"), "f{\"i\": 12} |");
  EXPECT_EQ(call("i", "twelve"), "f{\"i\": \"twelve\"} |");
  EXPECT_EQ(call("n", "1.5"), "f{\"n\": 1.5} |");
  EXPECT_EQ(call("n", "None"), "f{\"n\": null} |");
  EXPECT_EQ(call("b", "True"), "f{\"b\": true} |");
  EXPECT_EQ(call("o", "{\"a\": [1, null]}"), "f{\"o\": {\"a\": [1, null]}} |");
  EXPECT_EQ(call("any", "[1, 'x']"), "f{\"any\": [1, \"x\"]} |");
  EXPECT_EQ(call("c", "1"), "f{\"c\": \"1\"} |");
  EXPECT_EQ(call("all", "1"), "f{\"all\": \"1\"} |");
  EXPECT_EQ(call("u", "7"), "f{\"u\": 7} |");
  EXPECT_EQ(call("u", "x"), "f{\"u\": \"x\"} |");
  EXPECT_EQ(call("unknown", "7"), "f{\"unknown\": \"7\"} |");
  // vLLM's coerce_to_schema_type() knows Python's names, too.
  EXPECT_EQ(call("f", "3.14"), "f{\"f\": 3.14} |");
  EXPECT_EQ(call("d", "{\"a\": 1}"), "f{\"d\": {\"a\": 1}} |");
  EXPECT_EQ(call("str", "7"), "f{\"str\": \"7\"} |");
}

TEST(QwenCoderCalls, TheOuterMarkMayBeMissing) {
  EXPECT_EQ(shown("qwen3_coder", "Yes:\n<function=f>\n</function>\n</tool_call>"), "f{} |Yes:");
  EXPECT_EQ(shown("qwen3_coder", "<function=f></function>\nDone."), "f{} |\nDone.");
}

TEST(QwenCoderCalls, ACutEndMarkIsNoText) {
  EXPECT_EQ(shown("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</to"), "f{} |");
}

TEST(QwenCoderCalls, WhatDoesNotParseIsText) {
  ChatParserOptions options{.tools = tools_named({"f"}), .whole_calls = true};
  for (const std::string text :
       {"<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=a>\n2\n</parameter>\n</function>",
        "<tool_call>\n<function=f>\n<parameter=a>\n1", "<tool_call>\n<function=f>\nno",
        "<tool_call><function=></function></tool_call>", "a<function=\n"}) {
    const ChatMessage message = parse(format_named("qwen3_coder"), options, {text});
    EXPECT_EQ(message.content, text);
    EXPECT_TRUE(message.tool_calls.empty());
  }
}

TEST(LlamaCalls, StandAtTheBeginningOrBehindThePythonTag) {
  EXPECT_EQ(shown("llama3_json", "{\"name\": \"f\", \"parameters\": {\"a\": \"x\"}}"),
            "f{\"a\": \"x\"} |");
  EXPECT_EQ(shown("llama3_json",
                  " {\"type\": \"function\", \"name\": \"f\", \"parameters\": {}}; "
                  "{\"name\": \"g\", \"parameters\": {}}"),
            "f{} g{} |");
  for (const std::string between :
       {"; ", " ; ", ";", "\n", "", ", ", ",\n"})  // vLLM takes any text
    EXPECT_EQ(shown("llama3_json", "{\"name\": \"f\", \"parameters\": {}}" + between +
                                       "{\"name\": \"g\", \"parameters\": {}}"),
              "f{} g{} |")
        << between;
  EXPECT_EQ(shown("llama3_json", "{\"name\": \"f\", \"parameters\": {}}\n{\"a\": 1}"),
            "f{} |\n{\"a\": 1}");
  EXPECT_EQ(shown("llama3_json", "Sure. <|python_tag|>{\"name\": \"f\", \"parameters\": {}}"),
            "f{} |Sure.");
}

// Complete calls and calls that come in pieces leave the same text.
TEST(Calls, TextBehindACallHasNoneOfIt) {
  const std::string calls[][2] = {
      {"llama3_json", "{\"name\": \"f\", \"parameters\": {}}"},
      {"hermes", "<tool_call>{\"name\": \"f\", \"arguments\": {}}"},
      {"mistral", "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}}"},
      {"pythonic", "<|python_start|>[f(a=1)"},
      {"qwen3_coder", "<tool_call><function=f></function>"},
  };
  for (const auto& [parser, call] : calls)
    for (const bool whole : {false, true}) {
      const ChatParserOptions options{.tools = tools_named({"f"}), .whole_calls = whole};
      const ChatMessage message = parse(format_named(parser), options, {call + "; so"});
      EXPECT_EQ(message.content, "; so") << parser << whole;
      EXPECT_EQ(message.tool_calls.size(), 1u) << parser << whole;
    }
}

TEST(LlamaCalls, AnAnswerInJsonStaysAnAnswer) {
  for (const std::string text :
       {"{\"a\": 1}", "{\"name\": \"Bob\", \"parameters\": {}}",
        "Use {\"name\": \"f\", \"parameters\": {}}", " {", "{}", "<|python_tag|>import os"})
    EXPECT_EQ(shown("llama3_json", text), "|" + text);
  ChatParser parser(format_named("llama3_json"), {.tools = tools_named({"f"})});
  EXPECT_EQ(parser.add("{\"title\": 1").content, "{\"title\": 1");  // it does not wait for its end
}

TEST(MistralCalls, HaveTwoForms) {
  EXPECT_EQ(shown("mistral",
                  "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": 1}}, {\"name\": "
                  "\"g\", \"arguments\": {}, \"id\": \"abcdefghi\"}]"),
            "f{\"a\": 1} g{} |");
  EXPECT_EQ(shown("mistral",
                  "Well. [TOOL_CALLS]f[ARGS]{\"a\": \"]\"}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}"),
            "f{\"a\": \"]\"} g{} |Well.");
  EXPECT_EQ(shown("mistral", "[TOOL_CALLS]f{\"a\": 1}"), "f{\"a\": 1} |");
  const ChatMessage message = read("mistral", "[TOOL_CALLS]f{}", tools_named({"f"}));
  EXPECT_EQ(message.tool_calls[0].id.size(), 9u);
  EXPECT_TRUE(std::ranges::all_of(message.tool_calls[0].id,
                                  [](unsigned char c) { return std::isalnum(c) != 0; }));
}

TEST(MistralCalls, WhatDoesNotParseIsText) {
  ChatParserOptions options{.tools = tools_named({"f"}), .whole_calls = true};
  for (const std::string text :
       {"[TOOL_CALLS]", "[TOOL_CALLS]f", "[TOOL_CALLS]\n{}", "[TOOL_CALLS]f[ARGS]{\"a\"",
        "[TOOL_CALLS][{\"name\": \"f\"", "[TOOL_CALLS][1]"}) {
    const ChatMessage message = parse(format_named("mistral"), options, {text});
    EXPECT_EQ(message.content, text);
    EXPECT_TRUE(message.tool_calls.empty());
  }
}

TEST(PythonicCalls, ArePythonsListsOfCalls) {
  EXPECT_EQ(shown("pythonic", "[f(a=1, b='it\\'s', c=[True, None, {'k': -2.5e3}]), g()]"),
            "f{\"a\": 1, \"b\": \"it's\", \"c\": [true, null, {\"k\": -2.5e3}]} g{} |");
  EXPECT_EQ(shown("pythonic", "Hm. <|python_start|>[f(a=\"),]\", b={})]<|python_end|>"),
            "f{\"a\": \"),]\", \"b\": {}} |Hm.");
  EXPECT_EQ(shown("pythonic", "<|python_start|>[f()]<|pyth"), "f{} |");
  EXPECT_EQ(shown("pythonic", "[f(größe=1, 名='x')]"), "f{\"größe\": 1, \"名\": \"x\"} |");
  EXPECT_EQ(shown("pythonic", "[f(a=\"\\u00e9\\n\\x41\\ud83c\\udf26\")]"),
            "f{\"a\": \"é\\nA🌦\"} |");
}

TEST(PythonicCalls, OtherBracketsAreText) {
  for (const std::string text : {"[1, 2]", "[f](http://x)", "[h(a=1)]", "[f(1)]", "[f(a=x)]", "[",
                                 "[f(a=1", "[f(a=__import__('os'))]", "x [f(a=1)]"}) {
    ChatParserOptions options{.tools = tools_named({"f"}), .whole_calls = true};
    const ChatMessage message = parse(format_named("pythonic"), options, {text});
    EXPECT_EQ(message.content, text);
    EXPECT_TRUE(message.tool_calls.empty());
  }
}

// -- Reasoning

/// "reasoning|content".
std::string thought(const std::string& parser, const std::string& text, bool is_open = false) {
  const ChatMessage m =
      parse_everywhere(format_named("none", parser), {.is_reasoning = is_open}, text);
  return m.reasoning + "|" + m.content;
}

TEST(Reasoning, IsApartFromTheAnswer) {
  EXPECT_EQ(thought("qwen3", "<think>\nHm\n\nyes.\n</think>\n\nYes."), "Hm\n\nyes.|Yes.");
  EXPECT_EQ(thought("deepseek_r1", "Hm\n</think>\n\nYes. </think>", true), "Hm|Yes. </think>");
  EXPECT_EQ(thought("qwen3", "\n\nYes <think>no</think>."), "|\n\nYes <think>no</think>.");
  EXPECT_EQ(thought("qwen3", "<think>\n\n</think>\n\nYes."), "|Yes.");
  EXPECT_EQ(thought("qwen3", "<think>never done </thin"), "never done </thin|");
  EXPECT_EQ(thought("qwen3", " <thi"), "| <thi");
  EXPECT_EQ(thought("mistral", "[THINK]Hm[/THINK]Yes."), "Hm|Yes.");
  EXPECT_EQ(thought("seed_oss", "\n<seed:think>Hm</seed:think>\nYes."), "Hm|Yes.");
  EXPECT_EQ(thought("none", "<think>a</think>b"), "|<think>a</think>b");
}

TEST(Reasoning, HasOtherMarksInOtherFamilies) {
  EXPECT_EQ(thought("granite", "<think>Hm</think><response>Yes. </response>"), "Hm|Yes.");
  EXPECT_EQ(thought("granite", "Here's my thought process: Hm. Here is my response: Yes."),
            "Hm.|Yes.");
  EXPECT_EQ(thought("granite", "<response>Yes.</response>"), "|Yes.");
  EXPECT_EQ(thought("openai_gptoss",
                    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final"
                    "<|message|>Yes.<|return|>"),
            "Hm.|Yes.");
  EXPECT_EQ(thought("openai_gptoss", "<|channel|>final<|message|>Yes."), "|Yes.");
}

TEST(Reasoning, ThePromptTellsWhetherTheBlockIsOpen) {
  const ChatFormat format = format_named("none", "qwen3");
  EXPECT_TRUE(format.opens_reasoning("<|im_start|>assistant\n<think>\n"));
  EXPECT_FALSE(format.opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n"));
  EXPECT_FALSE(format.opens_reasoning("What is <think>?<|im_end|>\n<|im_start|>assistant\n"));
  EXPECT_FALSE(format_named("none").opens_reasoning("<think>"));
}

TEST(Reasoning, CallsComeBehindIt) {
  const ChatFormat format = format_named("hermes", "qwen3");
  const ChatMessage m = parse_everywhere(
      format, {.is_reasoning = true, .tools = tools_named({"f"})},
      "Use <tool_call>{\"name\": \"f\"}</tool_call>?\n</think>\n\n<tool_call>\n{\"name\": "
      "\"f\"}\n</tool_call>");
  EXPECT_EQ(m.reasoning, "Use <tool_call>{\"name\": \"f\"}</tool_call>?");
  EXPECT_EQ(m.content, "");
  EXPECT_EQ(m.tool_calls.size(), 1u);
}

TEST(ChatFormat, AnUnknownParserIsRefusedWithTheKnownOnes) {
  for (const auto& [tools, reasoning] : {std::pair("hermit", ""), std::pair("", "hermit")}) {
    try {
      choose_chat_format("", tools, reasoning);
      ADD_FAILURE() << "must fail";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
      EXPECT_NE(std::string(error.what()).find(*tools ? "llama3_json" : "deepseek_r1"),
                std::string::npos);
    }
  }
}

// -- Any text

std::string without_space(std::string text) {
  std::erase_if(text, [](char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; });
  return text;
}

/// NANOVLLM_CHAT_TEXTS: how many; the nightly run takes a million.
TEST(ChatParser, RandomAndMutatedTextsNeverThrowAndNothingIsLost) {
  const std::vector<std::string> pieces = {"<tool_call>",
                                           "</tool_call>",
                                           "\n",
                                           " ",
                                           "{\"name\": \"f\", \"arguments\": {\"a\": 1}}",
                                           "{",
                                           "}",
                                           "\"name\"",
                                           ":",
                                           "\"f\"",
                                           "\"arguments\"",
                                           "\"parameters\"",
                                           ",",
                                           "[",
                                           "]",
                                           "(",
                                           ")",
                                           "f",
                                           "a=1",
                                           "=",
                                           "'x'",
                                           "<function=f>",
                                           "<parameter=a>",
                                           "1",
                                           "</parameter>",
                                           "</function>",
                                           "[TOOL_CALLS]",
                                           "[ARGS]",
                                           "[CALL_ID]",
                                           "<|python_tag|>",
                                           ";",
                                           "<|python_start|>",
                                           "<|python_end|>",
                                           "<think>",
                                           "</think>",
                                           "<",
                                           "é",
                                           "\\",
                                           "\"",
                                           "null",
                                           "1e5",
                                           "-",
                                           "\\u12",
                                           "<seed:tool_call>",
                                           "text",
                                           "<tool",
                                           "_call>"};
  const std::vector<Tool> tools = {
      {.name = "f", .parameters = R"({"properties": {"a": {"type": "integer"}}})"}};
  const char* texts = std::getenv("NANOVLLM_CHAT_TEXTS");
  const int rounds = texts ? std::atoi(texts) : 20000;
  RandomJson random(11);
  size_t calls = 0;
  for (int round = 0; round < rounds && !HasFailure(); ++round) {
    static const char* kParsers[] = {"hermes",  "qwen3_coder", "llama3_json",
                                     "mistral", "pythonic",    "seed_oss"};
    const std::string parser = kParsers[random.below(6)];
    std::string text;
    for (size_t n = random.below(14); n > 0; --n) text += pieces[random.below(pieces.size())];
    for (size_t n = random.below(3); n > 0 && !text.empty(); --n)
      text.erase(random.below(text.size()), 1);
    const ChatFormat format = format_named(parser, random.below(2) ? "qwen3" : "none");
    ChatParserOptions options{
        .is_reasoning = random.below(4) == 0, .tools = tools, .whole_calls = random.below(2) == 0};
    const std::string_view view = text;
    const size_t cut = random.below(text.size() + 1);
    const ChatMessage whole = parse(format, options, {view});
    const ChatMessage halves = parse(format, options, {view.substr(0, cut), view.substr(cut)});
    EXPECT_TRUE(whole.reasoning == halves.reasoning && whole.content == halves.content &&
                whole.tool_calls == halves.tool_calls)
        << parser << ": " << text;
    calls += whole.tool_calls.size();
    for (const ToolCall& call : whole.tool_calls)
      EXPECT_TRUE(!options.whole_calls || Json::parse(call.arguments, nullptr, false).is_object())
          << text;
    const bool is_plain = whole.tool_calls.empty() && !format.reasoning;
    EXPECT_TRUE(!is_plain || without_space(whole.content) == without_space(text)) << text;
  }
  EXPECT_GT(calls, static_cast<size_t>(rounds) / 200);
}

}  // namespace
}  // namespace nanovllm
