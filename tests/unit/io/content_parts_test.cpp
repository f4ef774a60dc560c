// Messages whose content is a list of parts. What templates make of text alone is
// jinja_reference_test's.
#include <string>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "io/jinja/chat_template.h"

namespace nanovllm {
namespace {

/// The text that `source` makes of one message of two text parts, "a" and "b".
std::string render_parts(const std::string& source) {
  const ChatTemplate chat_template(source, "chat_template");
  ChatRequest request;
  request.messages = Json::parse(
      R"([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}])");
  take_text_parts(chat_template, request);
  return chat_template.render(chat_context(request));
}

// Joined as vLLM's "string" content format joins them.
TEST(ContentParts, AreOneTextWhereTheTemplateKnowsTextAlone) {
  for (const char* source : {
           "{% for m in messages %}{{ m.content + '' }}{% endfor %}",  // would fail
           "{% for m in messages %}{{ m.content }}{% endfor %}",       // would print the list
           "{% for m in messages %}{{ m.content | trim }}{% endfor %}",
           "{% for m in messages %}{{ m.content | tojson }}{% endfor %}",
           "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% endif %}{% endfor "
           "%}",
       }) {
    const std::string expected =
        std::string(source).find("tojson") == std::string::npos ? "a\nb" : R"("a\nb")";
    EXPECT_EQ(render_parts(source), expected) << source;
  }
}

TEST(ContentParts, StayPartsWhereTheTemplateWalksThroughThem) {
  EXPECT_EQ(render_parts("{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}"
                         "{% endfor %}"),
            "<a><b>");
  EXPECT_EQ(render_parts("{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}"
                         "<{{ p['text'] }}>{% endif %}{% endfor %}{% endfor %}"),
            "<a><b>");
}

TEST(ContentParts, OtherKindsAreRefusedByTheirPlace) {
  const ChatTemplate chat_template("{{ messages[0].content }}", "chat_template");
  for (const char* bad :
       {R"({"type": "image_url", "image_url": {"url": "http://x/"}})", R"("text")",
        R"({"type": "text"})", R"({"text": "x"})", R"({"type": "text", "text": 1})"}) {
    ChatRequest request;
    request.messages = Json::parse(fmt::format(
        R"([{{"role": "user", "content": "x"}}, {{"role": "user", "content": [{}]}}])", bad));
    try {
      take_text_parts(chat_template, request);
      ADD_FAILURE() << bad << " is accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
      EXPECT_EQ(std::string(error.what()).find("messages[1].content[0]: must be"), 0u)
          << error.what();
    }
  }
}

}  // namespace
}  // namespace nanovllm
