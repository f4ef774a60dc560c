// The cost that a template may have, the things that it must not reach, and its variables.
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "io/jinja/chat_template.h"

namespace nanovllm {
namespace {

std::string render(const std::string& source, const Json& context = Json::object(),
                   const ChatTemplateLimits& limits = {}) {
  return ChatTemplate(source, "chat_template").render(context, limits);
}

/// The message of the Error that rendering `source` ends in.
std::string failure(const std::string& source, const ChatTemplateLimits& limits = {}) {
  try {
    const std::string text = render(source, Json::object(), limits);
    ADD_FAILURE() << source << " gives " << text.substr(0, 100);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(ChatTemplateLimits, EachLimitEndsTheRenderWithItsName) {
  ChatTemplateLimits limits;
  limits.max_steps = 1000;
  EXPECT_EQ(failure("{% for i in range(9999) %}{{ i }}{% endfor %}", limits),
            "chat_template:1: the template takes more than 1000 steps");
  limits = {};
  limits.max_output_bytes = 10;
  EXPECT_EQ(failure("12345678901", limits), "chat_template:1: the text is longer than 10 bytes");
  EXPECT_EQ(render("1234567890", Json::object(), limits), "1234567890");
  limits = {};
  limits.max_depth = 20;
  EXPECT_EQ(failure("{% macro f() %}{{ f() }}{% endmacro %}\n{{ f() }}", limits),
            "chat_template:1: the template nests deeper than 20 levels");
  limits = {};
  limits.max_memory_bytes = 1 << 20;
  EXPECT_EQ(failure("\n{{ 'x' * 2000000 }}", limits),
            "chat_template:2: the template needs more than 1048576 bytes of memory");
}

TEST(ChatTemplateLimits, HostileTemplatesEndSoonUnderTheDefaults) {
  const std::vector<std::string> sources = {
      "{{ '-' * 10 ** 10 }}",
      "{{ range(10 ** 9) }}",
      "{{ [0] * 10 ** 12 }}",
      "{{ 9 ** 9 ** 9 ** 9 }}",
      "{{ '%999999999d' % 1 }}",
      "{{ '{:999999999}'.format(1) }}",
      "{{ 'a'.center(10 ** 12) }}",
      "{{ 'a\nb' | indent(10 ** 12) }}",
      "{{ [1] | batch(10 ** 12, 0) | list }}",
      "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% "
      "endfor %}",
      "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = [ns.l] %}{% endfor %}",
      "{% set ns = namespace(s='a' * 9999999) %}{% for i in range(9999) %}{{ ns.s | upper | length "
      "}}{% endfor %}",
      "{% set ns = namespace() %}{% for i in range(9999) %}{% set ns.l = [ns.l.count if ns.l else "
      "ns] %}{% endfor %}",
      "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
      "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
      "{% for x in [[1]] recursive %}{{ loop([x]) }}{% endfor %}",
  };
  for (const std::string& source : sources) EXPECT_NE(failure(source), "") << source;
}

TEST(ChatTemplateLimits, DeepSourceIsRefusedWhenItIsParsed) {
  const auto repeated = [](const std::string& text, int count) {
    std::string out;
    for (int i = 0; i < count; ++i) out += text;
    return out;
  };
  for (const std::string& source :
       {"{{ " + repeated("(", 100000), "{{ " + repeated("[", 100000),
        "{{ " + repeated("not ", 100000), "{{ " + repeated("-", 100000) + "1 }}",
        "{{ x" + repeated(".a", 100000) + " }}", "{{ x" + repeated("|upper", 100000) + " }}",
        repeated("{% if x %}", 100000), "{{ " + repeated("1 if x else ", 100000) + "1 }}",
        "{% set " + repeated("(", 100000)}) {
    EXPECT_THROW(ChatTemplate(source, "deep"), Error) << source.substr(0, 20);
  }
  EXPECT_EQ(render("{{ 0" + repeated(" + 1", 5000) + " }}"), "5000") << "a long row is not deep";
}

TEST(ChatTemplateLimits, ANamespaceThatHoldsItselfIsFreed) {
  EXPECT_EQ(
      render("{% set ns = namespace() %}{% set ns.me = [ns, {'again': ns}] %}{{ ns.me[0] == ns }}"),
      "True");
  EXPECT_EQ(
      render("{% set ns = namespace() %}{% for i in [1] %}{% macro m() %}{{ i }}{% endmacro %}"
             "{% set ns.m = m %}{% endfor %}{{ ns.m() }}"),
      "1")
      << "a macro keeps the variables around it";
}

TEST(ChatTemplate, RefusesWhatIsNoUtf8AndVariablesThatAreNoObject) {
  EXPECT_THROW(ChatTemplate("\xff", "bytes"), Error);
  EXPECT_THROW(render("x", Json::array()), Error);
}

TEST(ChatTemplate, ReportsTheLineOfAnError) {
  EXPECT_EQ(failure("a\n\n{% if true %}\n{{ missing.name }}{% endif %}"),
            "chat_template:4: 'missing' is undefined");
  try {
    ChatTemplate("a\nb\n{% nonsense %}", "chat_template");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::model);
    EXPECT_STREQ(error.what(), "chat_template:3: unknown tag 'nonsense'");
  }
}

TEST(ChatTemplate, OneTemplateRendersOnSeveralThreadsAtOnce) {
  const ChatTemplate shared(
      "{% for i in range(200) %}{{ 'ab' | upper }}{{ i }}{% endfor %}{{ name }}", "shared");
  std::vector<std::string> texts(4);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < texts.size(); ++i) {
    threads.emplace_back([&, i] { texts[i] = shared.render({{"name", std::to_string(i)}}); });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < texts.size(); ++i)
    EXPECT_TRUE(texts[i].ends_with("AB199" + std::to_string(i)));
}

TEST(ChatContext, GivesTheVariablesTransformersGives) {
  ChatRequest request;
  request.messages = {{{"role", "user"}, {"content", "q"}},
                      {{"role", "assistant"}, {"content", "a"}, {"reasoning", "why"}}};
  request.special_tokens = {{"bos_token", "<s>"}, {"eos_token", "</s>"}};
  request.kwargs = {{"eos_token", "<end>"}, {"enable_thinking", false}};
  const Json context = chat_context(request);
  EXPECT_EQ(context["bos_token"], "<s>");
  EXPECT_EQ(context["eos_token"], "<end>") << "variables of the caller win";
  EXPECT_EQ(context["enable_thinking"], false);
  EXPECT_EQ(context["add_generation_prompt"], true);
  EXPECT_TRUE(context["tools"].is_null());
  EXPECT_EQ(context["messages"][0], request.messages[0]);
  EXPECT_EQ(context["messages"][1]["reasoning_content"], "why");
  EXPECT_EQ(context["messages"][1]["thinking"], "why");
}

// The result of transformers' _alias_reasoning_fields: templates that print a whole message show
// the order.
TEST(ChatContext, ThinkingComesFirstInAMessage) {
  ChatRequest request;
  request.messages = Json::parse(
      R"([{"role": "assistant", "reasoning": "why", "content": "x"},
          {"role": "a", "thinking": "t", "content": "c", "reasoning_content": "r"},
          {"role": "a", "thinking": null, "reasoning": "w"},
          {"role": "a", "reasoning_content": "r", "content": "c"}])");
  EXPECT_EQ(
      chat_context(request)["messages"].dump(),
      R"([{"thinking":"why","role":"assistant","reasoning":"why","content":"x","reasoning_content":"why"},)"
      R"({"thinking":"t","role":"a","content":"c","reasoning_content":"r"},)"
      R"({"thinking":null,"role":"a","reasoning":"w","reasoning_content":"w"},)"
      R"({"thinking":"r","role":"a","reasoning_content":"r","content":"c"}])");
}

TEST(ChatContext, RefusesMessagesThatAreNoObjects) {
  ChatRequest request;
  request.messages = {"hello"};
  EXPECT_THROW(chat_context(request), Error);
  request.messages = "hello";
  EXPECT_THROW(chat_context(request), Error);
}

}  // namespace
}  // namespace nanovllm
