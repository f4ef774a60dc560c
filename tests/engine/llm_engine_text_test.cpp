// Text and stop strings in the engine: what ends an answer, and what is shown of it.
#include <gtest/gtest.h>

#include "engine/byte_tokenizer.h"
#include "engine/scripted_engine.h"

namespace nanovllm {
namespace {

/// Over a tokenizer of bytes and of the pieces that the tests name.
class LLMEngineTextTest : public LLMEngineTest {
 protected:
  /// The output of a request whose tokens are `tokens`.
  CompletionOutput answer(const std::vector<int32_t>& tokens, SamplingParams p) {
    model_.vocab_size = 300;
    p.seed = 1;
    for (size_t i = 0; i < tokens.size(); ++i)
      script_->tokens[1][static_cast<int32_t>(3 + i)] = tokens[i];
    LLMEngine engine = make(tokenizer_.shared());
    engine.add_request({1, 2, 3}, p);
    return run(engine).at(0).outputs[0];
  }
  static SamplingParams stop_at(const std::string& stop, int64_t max_tokens) {
    SamplingParams p = params(1, max_tokens);
    p.stop = {stop};
    return p;
  }

  static constexpr int32_t kEndsStop = 256;
  ByteTokenizer tokenizer_{{"b\xc3"}};
};

TEST_F(LLMEngineTextTest, AStopStringInTheLastTokenIsTheReasonThatCounts) {
  const CompletionOutput out = answer({'x', 'a', 'b'}, stop_at("ab", 3));
  EXPECT_EQ(out.text, "x");
  EXPECT_EQ(out.finish_reason, FinishReason::stop);
  EXPECT_EQ(out.stop_reason, "ab");
}

// As in vLLM, whose detokenizer looks for stop strings once more tokens than min_tokens are there.
TEST_F(LLMEngineTextTest, AStopStringCountsFromTheTokenBehindMinTokens) {
  SamplingParams p = stop_at("b", 6);
  p.min_tokens = 1;
  EXPECT_EQ(answer({'b', 'b', 'x', 'b'}, p).token_ids, (std::vector<int32_t>{'b', 'b'}));
  p.min_tokens = 2;
  EXPECT_EQ(answer({'b', 'b', 'x', 'b'}, p).token_ids, (std::vector<int32_t>{'b', 'b', 'x', 'b'}));
}

TEST_F(LLMEngineTextTest, NothingFollowsAStopStringWhoseTokenBeginsACharacter) {
  EXPECT_EQ(answer({'x', 'a', kEndsStop}, stop_at("ab", 9)).text, "x");
  SamplingParams included = stop_at("ab", 9);
  included.include_stop_str_in_output = true;
  EXPECT_EQ(answer({'x', 'a', kEndsStop}, included).text, "xab");
}

}  // namespace
}  // namespace nanovllm
