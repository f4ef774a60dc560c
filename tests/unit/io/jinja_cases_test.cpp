// Every feature of the template language, one small template each, against what Python's jinja2
// made of it (tools/make_jinja_cases.py writes the cases).
#include <string>

#include <gtest/gtest.h>

#include "io/jinja/chat_template.h"

namespace nanovllm {
namespace {

std::tm fixed_clock() {
  std::tm now{};
  strptime("2025-03-05T14:07:09", "%Y-%m-%dT%H:%M:%S", &now);
  return now;
}

void expect_text(const std::string& source, const Json& context, const std::string& expected) {
  try {
    EXPECT_EQ(ChatTemplate(source, "case", fixed_clock).render(context), expected) << source;
  } catch (const Error& error) {
    ADD_FAILURE() << source << "\nfails: " << error.what();
  }
}

/// A syntax error is found when the template is parsed; the rest when it runs. raise_exception
/// keeps its message.
void expect_error(const std::string& source, const Json& context, const Json& one) {
  const std::string type = one["error"]["type"];
  try {
    const ChatTemplate parsed(source, "case", fixed_clock);
    EXPECT_NE(type, "TemplateSyntaxError") << source << "\nshould not parse";
    const std::string text = parsed.render(context);
    ADD_FAILURE() << source << "\nshould fail (" << one["error"].dump() << ") but gives " << text;
  } catch (const Error& error) {
    if (type == "TemplateError") {
      EXPECT_EQ(error.what(), one["error"]["message"].get<std::string>());
    } else {
      EXPECT_EQ(std::string(error.what()).rfind("case:", 0), 0U)
          << "names its place: " << error.what();
    }
    if (type == "TemplateSyntaxError") {
      EXPECT_EQ(error.kind(), ErrorKind::model) << source;
    }
  }
}

TEST(ChatTemplateCases, EveryFeatureGivesWhatPythonGives) {
  const Json file = read_json_file(NANOVLLM_SOURCE_DIR "/tests/data/jinja/cases.json");
  ASSERT_GT(file["cases"].size(), 150U);
  for (const Json& one : file["cases"]) {
    const std::string source = one["template"];
    if (one.contains("error")) {
      expect_error(source, file["context"], one);
    } else {
      expect_text(source, file["context"], one["expected"]);
    }
  }
}

}  // namespace
}  // namespace nanovllm
