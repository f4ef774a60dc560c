// Calls written in Python, from random arguments.
#include "parse_rig.h"

namespace nanovllm {
namespace {

/// `value` as Python's repr() writes it, but for strings, which have either quote.
std::string python_repr(const Json& value, RandomJson& random) {
  if (value.is_null()) return "None";
  if (value.is_boolean()) return value.get<bool>() ? "True" : "False";
  if (value.is_string()) {
    const char quote = random.below(2) == 0 ? '\'' : '"';
    std::string text(1, quote);
    for (const char c : value.get<std::string>()) {
      if (c == quote || c == '\\') text += '\\';
      if (c == '\n')
        text += "\\n";
      else if (c == '\x01')
        text += "\\x01";
      else
        text += c;
    }
    return text + quote;
  }
  if (!value.is_structured()) return value.dump();
  std::string text;
  for (auto it = value.begin(); it != value.end(); ++it) {
    if (!text.empty()) text += ", ";
    if (value.is_object()) text += python_repr(it.key(), random) + ": ";
    text += python_repr(*it, random);
  }
  return value.is_object() ? "{" + text + "}" : "[" + text + "]";
}

// No published template writes them: here a model that writes Python does.
TEST(PythonicCalls, ThatPythonWritesParseBackHoweverTheyAreCut) {
  RandomJson random(5);
  for (int round = 0; round < 60 && !HasFailure(); ++round) {
    std::vector<Json> expected;
    std::string text;
    for (size_t n = 1 + random.below(3); n > 0; --n) {
      Json arguments = Json::object();
      text += text.empty() ? "[f(" : ", f(";
      for (size_t k = random.below(4); k > 0; --k) {
        const std::string name = "p" + std::to_string(k);
        arguments[name] = random.value(random.any_type());
        text +=
            (arguments.size() > 1 ? ", " : "") + name + "=" + python_repr(arguments[name], random);
      }
      text += ")";
      expected.push_back(std::move(arguments));
    }
    text += "]";
    const bool has_marks = random.below(2) == 0;
    if (has_marks) text = "<|python_start|>" + text + "<|python_end|>";
    const ChatMessage message = parse_everywhere(format_named("pythonic"),
                                                 {.tools = tools_named({"f"}), .id_seed = 1}, text);
    EXPECT_EQ(message.content, "") << text;
    ASSERT_EQ(message.tool_calls.size(), expected.size()) << text;
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_EQ(nlohmann::json(Json::parse(message.tool_calls[i].arguments, nullptr, false)),
                nlohmann::json(expected[i]))
          << text;
  }
}

// As Python's own parser reads them, which is vLLM's: json.dumps() of ast.literal_eval().
TEST(PythonicCalls, TakePythonsOtherSpellings) {
  const auto arguments = [](const std::string& call) {
    const ChatMessage message = parse_everywhere(
        format_named("pythonic"), {.tools = tools_named({"f"}), .id_seed = 1}, "[" + call + "]");
    return message.tool_calls.empty() ? "" : message.tool_calls.front().arguments;
  };
  EXPECT_EQ(arguments("f( a = 1 , b\n=\n'x' )"), R"({"a": 1, "b": "x"})");
  EXPECT_EQ(arguments("f (a=1,)"), R"({"a": 1})");
  EXPECT_EQ(arguments("f(a=.5, b=-.5, c=[5.], d=+2, e=+.5)"),
            R"({"a": 0.5, "b": -0.5, "c": [5.0], "d": 2, "e": 0.5})");
  EXPECT_EQ(arguments("f(a=(1, 'x'), b=(), c=((1,), [2]), d=({'k': (3)}))"),
            R"({"a": [1, "x"], "b": [], "c": [[1], [2]], "d": {"k": 3}})");
  EXPECT_EQ(arguments(R"(f(a='\0\033[1m\1012\779\400'))"), R"({"a": "\u0000\u001b[1mA2?9Ā"})");
  EXPECT_EQ(arguments(R"py(f(a='''it's
"x", (\''' y''', b='''''', c=["("], d='', e="\\"))py"),
            R"({"a": "it's\n\"x\", (''' y", "b": "", "c": ["("], "d": "", "e": "\\"})");
  for (const char* bad : {"f(a b=1)", "f g(a=1)", "f(a= )", "f(a=.)", "f(a=1 2)", "f(a=(1 2))",
                          "f(a=(,))", "f(a=++)", "f(a=(1, 2])", "f(a='''x')"})
    EXPECT_EQ(arguments(bad), "") << bad;
}

}  // namespace
}  // namespace nanovllm
