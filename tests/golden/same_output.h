// Two outputs of one request, bit for bit.
#pragma once

#include <algorithm>
#include <cstring>

#include <gtest/gtest.h>

#include "nanovllm/llm.h"

namespace nanovllm {

/// The first `count` positions of both.
inline void expect_same(const std::vector<PositionLogprobs>& alone,
                        const std::vector<PositionLogprobs>& together, size_t count,
                        const char* what) {
  ASSERT_GE(alone.size(), count) << what;
  ASSERT_GE(together.size(), count) << what;
  for (size_t i = 0; i < count; ++i) {
    ASSERT_EQ(alone[i].size(), together[i].size()) << what << " " << i;
    for (size_t j = 0; j < alone[i].size(); ++j) {
      const TokenLogprob &a = alone[i][j], &b = together[i][j];
      ASSERT_EQ(a.token_id, b.token_id) << what << " " << i;
      ASSERT_EQ(std::memcmp(&a.logprob, &b.logprob, sizeof(float)), 0)
          << what << " " << i << ": " << a.logprob << " and " << b.logprob;
      ASSERT_EQ(a.rank, b.rank) << what << " " << i;
    }
  }
}

/// The tokens that an aborted answer got until then are the beginning of what it gets alone.
inline void expect_beginning(const CompletionOutput& alone, const CompletionOutput& together) {
  const size_t count = together.token_ids.size();
  ASSERT_LE(count, alone.token_ids.size());
  for (size_t i = 0; i < count; ++i) ASSERT_EQ(alone.token_ids[i], together.token_ids[i]) << i;
  if (!alone.logprobs.empty()) expect_same(alone.logprobs, together.logprobs, count, "logprobs");
}

inline void expect_same(const CompletionOutput& alone, const CompletionOutput& together) {
  ASSERT_EQ(alone.index, together.index);
  expect_beginning(alone, together);
  ASSERT_EQ(alone.token_ids.size(), together.token_ids.size());
  ASSERT_EQ(alone.finish_reason, together.finish_reason);
  ASSERT_EQ(alone.stop_reason, together.stop_reason);
  ASSERT_EQ(alone.text, together.text);
  ASSERT_EQ(alone.logprobs.size(), together.logprobs.size());
}

inline void expect_same(const RequestOutput& alone, const RequestOutput& together) {
  ASSERT_EQ(alone.error, together.error);
  ASSERT_EQ(alone.outputs.size(), together.outputs.size());
  for (size_t i = 0; i < alone.outputs.size(); ++i)
    expect_same(alone.outputs[i], together.outputs[i]);
  ASSERT_EQ(alone.prompt_logprobs.size(), together.prompt_logprobs.size());
  expect_same(alone.prompt_logprobs, together.prompt_logprobs, alone.prompt_logprobs.size(),
              "prompt_logprobs");
}

inline bool was_aborted(const RequestOutput& output) {
  return std::ranges::count(output.outputs, FinishReason::abort, &CompletionOutput::finish_reason) >
         0;
}

/// The same of a request that was aborted: its answers may have ended before, or are beginnings.
inline void expect_same_until_abort(const RequestOutput& alone, const RequestOutput& together) {
  ASSERT_EQ(alone.outputs.size(), together.outputs.size());
  for (size_t i = 0; i < alone.outputs.size(); ++i)
    if (together.outputs[i].finish_reason == FinishReason::abort)
      expect_beginning(alone.outputs[i], together.outputs[i]);
    else
      expect_same(alone.outputs[i], together.outputs[i]);
}

/// The answers of a request, each as a request of its own in an engine that does nothing else.
template <class Engine>
RequestOutput run_alone(Engine& llm, const Prompt& prompt, const SamplingParams& params) {
  RequestOutput whole;
  for (int i = 0; i < params.n; ++i) {
    SamplingParams own = params;
    own.n = 1;
    if (i > 0) {
      own.seed = answer_seed(params.seed.value(), i);
      own.prompt_logprobs.reset();
    }
    RequestOutput output =
        llm.generate(std::vector<Prompt>{prompt}, std::vector<SamplingParams>{own}).front();
    llm.reset_prefix_cache();
    output.outputs.at(0).index = i;
    if (output.failure == RequestFailure::refused) return output;  // as one, whatever n is
    if (i == 0) {
      whole = std::move(output);
      continue;
    }
    whole.outputs.push_back(std::move(output.outputs[0]));
    if (whole.error.empty()) whole.error = output.error, whole.failure = output.failure;
  }
  return whole;
}

}  // namespace nanovllm
