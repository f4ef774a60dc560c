// Grammars in the engine, over a device that samples from a script: what masks are asked for, when
// matchers move on, and what becomes of a matcher that fails.
#include <gtest/gtest.h>

#include "engine/scripted_engine.h"
#include "engine/test_grammars.h"

namespace nanovllm {
namespace {

using Tokens = std::vector<int32_t>;
using Choices = std::vector<Tokens>;

constexpr int32_t kEos = 99;  // of LLMEngineTest's engines

std::shared_ptr<const Grammar> choice(Choices choices) {
  return std::make_shared<TestGrammar>(
      [=] { return std::make_unique<ChoiceMatcher>(choices, kEos); });
}

class LLMEngineGrammarTest : public LLMEngineTest {
 protected:
  /// The script's tokens for seed 7 after a prompt of three tokens.
  void script(const Tokens& tokens, int64_t seed = 7) {
    for (size_t i = 0; i < tokens.size(); ++i)
      script_->tokens[seed][static_cast<int32_t>(3 + i)] = tokens[i];
  }
  RequestOutput answer(const SamplingParams& params,
                       const std::shared_ptr<const Grammar>& grammar) {
    LLMEngine engine = make();
    engine.add_request({1, 2, 3}, params, grammar);
    return run(engine).at(0);
  }
};

TEST_F(LLMEngineGrammarTest, AnAnswerMovesThroughItsGrammarAndEndsWhereItsTextEnds) {
  script({5, 6, kEos});
  const RequestOutput output = answer(params(7, 10), choice({{5}, {5, 6}, {8, 9}}));
  EXPECT_EQ(output.outputs[0].token_ids, (Tokens{5, 6, kEos}));
  EXPECT_EQ(output.outputs[0].finish_reason, FinishReason::stop);
  EXPECT_EQ(script_->allowed, (Choices{{5, 8}, {6, kEos}, {kEos}}));
}

TEST_F(LLMEngineGrammarTest, MaxTokensMayEndATextWithinItsGrammar) {
  script({5, 6, kEos});
  const RequestOutput output = answer(params(7, 1), choice({{5, 6}}));
  EXPECT_EQ(output.outputs[0].token_ids, (Tokens{5}));
  EXPECT_EQ(output.outputs[0].finish_reason, FinishReason::length);
}

TEST_F(LLMEngineGrammarTest, EachAnswerHasAMatcherOfItsOwn) {
  script({5, 6, kEos}, 7);
  script({8, 9, kEos}, answer_seed(7, 1));
  SamplingParams two = params(7, 10);
  two.n = 2;
  const RequestOutput output = answer(two, choice({{5, 6}, {8, 9}}));
  EXPECT_EQ(output.outputs[0].token_ids, (Tokens{5, 6, kEos}));
  EXPECT_EQ(output.outputs[1].token_ids, (Tokens{8, 9, kEos}));
}

TEST_F(LLMEngineGrammarTest, APreemptedAnswerKeepsItsPlace) {
  config_.num_gpu_blocks_override = 3;  // of 8 tokens: two answers of ten do not fit
  config_.enable_prefix_caching = false;
  const Tokens text{5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  LLMEngine engine = make();
  for (const int64_t seed : {7, 8}) {
    script(text, seed);
    engine.add_request({1, 2, 3}, params(seed, 11), choice({text}));
  }
  const auto outputs = run(engine);
  EXPECT_GT(outputs.at(1).metrics.num_preemptions, 0);
  for (const int64_t id : {0, 1}) EXPECT_EQ(outputs.at(id).outputs[0].token_ids, text) << id;
}

TEST_F(LLMEngineGrammarTest, BeforeMinTokensATextEndsOnlyWhereItsGrammarHasNothingElse) {
  script({5, 6, kEos});
  SamplingParams four = params(7, 10);
  four.min_tokens = 4;
  const RequestOutput output = answer(four, choice({{5}, {5, 6}}));
  EXPECT_EQ(script_->allowed, (Choices{{5}, {6}, {kEos}}));
  EXPECT_EQ(output.outputs[0].finish_reason, FinishReason::stop);
  EXPECT_EQ(output.outputs[0].token_ids.size(), 3u);
}

TEST_F(LLMEngineGrammarTest, IgnoredEosEndsATextOnlyWhereItsGrammarHasNothingElse) {
  script({5, 6, kEos});
  SamplingParams ignores = params(7, 10);
  ignores.ignore_eos = true;
  const RequestOutput output = answer(ignores, choice({{5}, {5, 6}}));
  EXPECT_EQ(script_->allowed, (Choices{{5}, {6}, {kEos}}));
  EXPECT_EQ(output.outputs[0].finish_reason, FinishReason::stop);
}

TEST_F(LLMEngineGrammarTest, AStopTokenOfTheRequestsOwnEndsItWhereTheGrammarAllowsIt) {
  script({5, 6, kEos});
  SamplingParams stops = params(7, 10);
  stops.stop_token_ids = {6};
  stops.ignore_eos = true;
  const RequestOutput output = answer(stops, choice({{5}, {5, 6}}));
  EXPECT_EQ(script_->allowed, (Choices{{5}, {6}}));
  EXPECT_EQ(output.outputs[0].stop_reason, "6");
}

/// `faulty` beside a request without a grammar: it fails alone, with `error`.
void expect_it_fails_alone(LLMEngine engine, const SamplingParams& params,
                           const std::shared_ptr<const Grammar>& faulty, const std::string& error) {
  engine.add_request({1, 2, 3}, params, faulty);
  engine.add_request({1, 2, 3}, params);
  std::map<int64_t, RequestOutput> outputs;
  while (!engine.is_finished())
    for (RequestOutput& output : engine.step()) outputs[output.request_id] = std::move(output);
  EXPECT_EQ(outputs.at(0).outputs[0].finish_reason, FinishReason::error);
  EXPECT_EQ(outputs.at(0).error, error);
  EXPECT_EQ(outputs.at(1).outputs[0].finish_reason, FinishReason::length);
}

TEST_F(LLMEngineGrammarTest, ATokenThatAMatcherDoesNotAcceptFailsItsRequestAlone) {
  script({5, 1});  // the mask had 6 alone
  expect_it_fails_alone(make(), params(7, 5), choice({{5, 6}}),
                        "the grammar does not allow token 1 here");
}

/// Fails on its second token.
class FaultyMatcher final : public ChoiceMatcher {
 public:
  enum class Fault { fill, empty, accept };
  explicit FaultyMatcher(Fault fault) : ChoiceMatcher({{1, 1, 1}}, kEos), fault_(fault) {}
  void fill_mask(std::span<uint32_t> mask) override {
    ChoiceMatcher::fill_mask(mask);
    if (!is_second_) return;
    if (fault_ == Fault::fill) throw std::runtime_error("too many states");
    if (fault_ == Fault::empty) std::ranges::fill(mask, 0u);
  }
  bool accept(int32_t token) override {
    if (is_second_ && fault_ == Fault::accept) throw std::runtime_error("too many states");
    is_second_ = true;
    return ChoiceMatcher::accept(token);
  }

 private:
  const Fault fault_;
  bool is_second_ = false;
};

TEST_F(LLMEngineGrammarTest, AMatcherThatFailsFailsItsRequestAlone) {
  using enum FaultyMatcher::Fault;
  for (const auto fault : {fill, empty, accept}) {
    const auto grammar =
        std::make_shared<TestGrammar>([=] { return std::make_unique<FaultyMatcher>(fault); });
    expect_it_fails_alone(make(), params(7, 5), grammar,
                          fault == empty ? "the grammar cannot go on: it allows no token"
                                         : "the grammar cannot go on: too many states");
  }
}

TEST_F(LLMEngineGrammarTest, AGrammarThatCannotBeginIsRefused) {
  const auto grammar = std::make_shared<TestGrammar>(
      []() -> std::unique_ptr<TokenMatcher> { throw std::runtime_error("no memory"); });
  const RequestOutput output = answer(params(7, 5), grammar);
  EXPECT_EQ(output.outputs[0].finish_reason, FinishReason::error);
  EXPECT_EQ(output.error, "the grammar cannot begin: no memory");
}

TEST_F(LLMEngineGrammarTest, StructureThatNobodyCompiledIsRefused) {
  SamplingParams structured = params(7, 5);
  structured.structured_outputs.regex = "a+";
  EXPECT_EQ(answer(structured, nullptr).error, "structured_outputs was not compiled to a grammar");
  EXPECT_EQ(answer(structured, choice({{1}})).error,
            "the grammar does not allow token 1 here");  // the script ignores the second mask
}

}  // namespace
}  // namespace nanovllm
