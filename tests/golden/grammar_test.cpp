// Grammars over a model that has learned something: models/demo, on the CPU.
#include <set>

#include "nanovllm/tokenizer.h"

#include "api/load_engine.h"
#include "engine/test_grammars.h"
#include "llm_rig.h"

namespace nanovllm {
namespace {

/// The texts of answers to one question under ChoiceMatchers.
std::vector<std::string> texts(const std::vector<std::string>& choices, double temperature) {
  LoadedEngine loaded = load_engine(demo(), demo_config());
  const Tokenizer& tokenizer = *loaded.tokenizer;
  const int32_t eos = tokenizer.eos_token_id().value();
  std::vector<std::vector<int32_t>> tokens;
  for (const std::string& choice : choices)
    tokens.push_back(tokenizer.encode(choice, false, false));
  const auto grammar =
      std::make_shared<TestGrammar>([=] { return std::make_unique<ChoiceMatcher>(tokens, eos); });
  SamplingParams params;
  params.temperature = temperature;
  params.max_tokens = 64;
  params.n = 20;
  params.seed = 5;
  params.output_kind = OutputKind::final_only;
  loaded.engine->add_request(tokenizer.encode("23 + 58 =", false, false), params, grammar);
  std::vector<std::string> list;
  while (!loaded.engine->is_finished())
    for (const RequestOutput& output : loaded.engine->step())
      for (const CompletionOutput& answer : output.outputs) {
        EXPECT_EQ(answer.finish_reason, FinishReason::stop);
        list.push_back(answer.text);
      }
  return list;
}

TEST(Grammar, EveryAnswerOfTheDemoIsOneOfItsChoices) {
  const std::vector<std::string> choices{" 81", " 810", " eighty-one", " \xc3\xa9t\xc3\xa9"};
  const auto list = texts(choices, 5);
  ASSERT_EQ(list.size(), 20u);
  for (const std::string& text : list) EXPECT_EQ(std::ranges::count(choices, text), 1) << text;
  EXPECT_GT(std::set(list.begin(), list.end()).size(), 1u) << "at this temperature";
}

TEST(Grammar, OfItsChoicesTheDemoTakesTheOneItKnowsToBeRight) {
  for (const std::string& text : texts({" 18", " 80", " 81", " 91"}, 0)) EXPECT_EQ(text, " 81");
}

}  // namespace
}  // namespace nanovllm
