// Published chat templates against what transformers made of them: the cases of
// shared/chat_templates.
#include <filesystem>
#include <map>
#include <string>

#include <gtest/gtest.h>

#include "io/jinja/chat_template.h"

namespace nanovllm {
namespace {

const std::string kFolder = NANOVLLM_SOURCE_DIR "/../shared/chat_templates/";

std::tm clock_of(const Json& one) {
  std::tm now{};
  const std::string text = one.value("now", "2025-03-05T14:07:09");
  strptime(text.c_str(), "%Y-%m-%dT%H:%M:%S", &now);
  return now;
}

/// The variables of a case, as its README names them.
Json context_of(const Json& one) {
  Json context = one["kwargs"];
  for (const char* name : {"messages", "tools", "documents", "add_generation_prompt"})
    context[name] = one[name];
  return context;
}

/// An accident of Python (a generator handed to tojson): an engine may render these.
bool may_render(const Json& one) {
  return one["template"] == "llama-cpp-deepseek-r1.jinja" &&
         one["error"]["message"].get<std::string>().find("generator") != std::string::npos;
}

struct Tally {
  int equal = 0, raised = 0, failed = 0, exempt = 0;
};

void run_case(const ChatTemplate& chat_template, const Json& one, Tally& tally) {
  const std::string label =
      one["template"].get<std::string>() + " / " + one["conversation"].get<std::string>();
  std::string text;
  try {
    text = chat_template.render(context_of(one));
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::invalid_argument) << label;
    if (!one.contains("error")) {
      ADD_FAILURE() << label << ": " << error.what();
    } else if (one["error"]["type"] == "TemplateError") {
      EXPECT_EQ(error.what(), one["error"]["message"].get<std::string>()) << label;
      ++tally.raised;
    } else {
      ++tally.failed;
    }
    return;
  }
  if (one.contains("expected")) {
    EXPECT_EQ(text, one["expected"].get<std::string>()) << label;
    ++tally.equal;
  } else if (may_render(one)) {
    ++tally.exempt;
  } else {
    ADD_FAILURE() << label << ": should fail: " << one["error"].dump() << "\nbut gives: " << text;
  }
}

TEST(ChatTemplateReference, RendersEveryPublishedTemplateAsTransformersDoes) {
  if (!std::filesystem::exists(kFolder + "cases.json"))
    GTEST_SKIP() << "no reference data beside this checkout";
  const Json cases = read_json_file(kFolder + "cases.json");
  std::map<std::string, ChatTemplate> templates;
  Tally tally;
  std::tm now{};
  for (const Json& one : cases) {
    const std::string name = one["template"];
    now = clock_of(one);
    auto known = templates.find(name);
    if (known == templates.end()) {
      ChatTemplate parsed(read_file(kFolder + name, size_t{1} << 20), name, [&now] { return now; });
      known = templates.emplace(name, std::move(parsed)).first;
    }
    run_case(known->second, one, tally);
  }
  EXPECT_EQ(cases.size(), 1446U);
  EXPECT_EQ(tally.equal, 1290);
  EXPECT_EQ(tally.raised, 51);
  EXPECT_EQ(tally.failed + tally.exempt, 105);
}

}  // namespace
}  // namespace nanovllm
