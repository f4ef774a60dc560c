// models/demo does what tools/demo_model taught it: sums that it never saw, questions, calls of
// tools, and answers in JSON of a given form. Expected answers are true ones, not the model's own.
#include <fstream>

#include <nlohmann/json.hpp>

#include "nanovllm/tokenizer.h"

#include "chat/chat_parser.h"
#include "llm_rig.h"

namespace nanovllm {
namespace {

std::vector<Json> rows_of(const std::string& name) {
  std::ifstream in(std::string(NANOVLLM_SOURCE_DIR) + "/tests/data/demo/" + name);
  std::vector<Json> rows;
  for (std::string line; std::getline(in, line);) rows.push_back(Json::parse(line));
  return rows;
}

class DemoAnswers : public testing::Test {
 protected:
  std::vector<std::string> answers(const std::vector<Prompt>& prompts, int64_t max_tokens = 160) {
    std::vector<std::string> texts;
    for (const RequestOutput& output : llm_.generate(prompts, greedy(max_tokens)))
      texts.push_back(output.error.empty() ? output.outputs[0].text : output.error);
    return texts;
  }
  Prompt chat(const Json& messages, const Json& options = Json::object()) {
    return llm_.chat_prompt(messages.dump(), options.dump());
  }
  /// The calls of an answer's text, as the server reads them.
  Json calls_in(const std::string& text, const Json& tools) const {
    ChatParser parser(choose_chat_format(llm_.tokenizer()->chat_template(), "", ""),
                      {.tools = read_tools(tools), .whole_calls = true});
    ChatMessage message;
    message.add(parser.add(text));
    message.add(parser.finish());
    Json calls = Json::array();
    for (const ToolCall& call : message.tool_calls)
      calls.push_back({{"name", call.name}, {"arguments", Json::parse(call.arguments)}});
    return calls;
  }
  /// One row in a hundred may go wrong: the weights are rounded, and other machines add otherwise.
  template <class Right>
  void expect_right(const std::vector<Json>& rows, const std::vector<std::string>& texts,
                    Right right) {
    ASSERT_FALSE(rows.empty());
    size_t wrong = 0;
    std::string shown;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (right(rows[i], texts[i])) continue;
      ++wrong;
      shown += rows[i].dump() + "\n  " + texts[i] + "\n";
    }
    EXPECT_LE(wrong, (rows.size() + 99) / 100) << shown;
  }
  LLM llm_{demo(), demo_config()};
};

TEST_F(DemoAnswers, SumsThatItNeverSawAndQuestions) {
  for (const char* file : {"arithmetic_heldout.jsonl", "questions.jsonl"}) {
    const std::vector<Json> rows = rows_of(file);
    std::vector<Prompt> prompts;
    for (const Json& row : rows) prompts.emplace_back(row["prompt"].get<std::string>());
    expect_right(rows, answers(prompts), [](const Json& row, const std::string& text) {
      const auto expected = row["expected"].get<std::string>();
      return text.substr(0, expected.size()) == expected;  // plain sums go on with others
    });
  }
}

// docs/quantisation.md has the scores.
TEST_F(DemoAnswers, SumsWithQuantisedWeightsOrKeysAndValues) {
  const std::vector<Json> rows = rows_of("arithmetic_heldout.jsonl");
  std::vector<Prompt> prompts;
  for (const Json& row : rows) prompts.emplace_back(row["prompt"].get<std::string>());
  for (const std::string format : {"fp8", "int8", "int4", "w4a8", "auto"}) {
    EngineConfig config = demo_config();
    config.quantization = format;
    if (format == "auto") config.kv_cache_dtype = "fp8";
    LLM llm(demo(), config);
    const auto outputs = llm.generate(prompts, greedy(160));
    int64_t right = 0;
    for (size_t i = 0; i < rows.size(); ++i)
      right += outputs[i].outputs[0].text.starts_with(rows[i]["expected"].get<std::string>());
    EXPECT_GE(right, 297) << format;
  }
}

TEST_F(DemoAnswers, CallsOfToolsAndWhatIsSaidOfTheirResults) {
  const std::vector<Json> rows = rows_of("calls.jsonl");
  std::vector<Prompt> asked, answered;
  for (const Json& row : rows) {
    Json messages = {{{"role", "user"}, {"content", row["question"]}}};
    asked.push_back(chat(messages, {{"tools", row["tools"]}}));
    Json calls = Json::array();
    for (const Json& call : row["calls"])
      calls.push_back({{"type", "function"}, {"function", call}});
    messages.push_back({{"role", "assistant"}, {"content", ""}, {"tool_calls", calls}});
    for (const Json& result : row["results"])
      messages.push_back({{"role", "tool"}, {"content", result}});
    answered.push_back(chat(messages, {{"tools", row["tools"]}}));
  }
  expect_right(rows, answers(asked), [&](const Json& row, const std::string& text) {
    return calls_in(text, row["tools"]) == row["calls"];
  });
  expect_right(rows, answers(answered), [](const Json& row, const std::string& text) {
    return text == row["expected"].get<std::string>();
  });
}

TEST_F(DemoAnswers, JsonOfAFormThatIsGivenInWords) {
  const std::vector<Json> rows = rows_of("json_forms.jsonl");
  std::vector<Prompt> prompts;
  for (const Json& row : rows)
    prompts.push_back(chat({{{"role", "system"}, {"content", row["system"]}},
                            {{"role", "user"}, {"content", row["question"]}}}));
  expect_right(rows, answers(prompts), [](const Json& row, const std::string& text) {
    return Json::parse(text, nullptr, false) == row["expected"];
  });
}

}  // namespace
}  // namespace nanovllm
