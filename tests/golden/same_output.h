// Two outputs of one request, bit for bit.
#pragma once

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

/// What an aborted request got until then is the beginning of what it gets alone.
inline void expect_beginning(const RequestOutput& alone, const RequestOutput& together) {
  const size_t count = together.token_ids.size();
  ASSERT_LE(count, alone.token_ids.size());
  for (size_t i = 0; i < count; ++i) ASSERT_EQ(alone.token_ids[i], together.token_ids[i]) << i;
  if (!alone.logprobs.empty()) expect_same(alone.logprobs, together.logprobs, count, "logprobs");
}

inline void expect_same(const RequestOutput& alone, const RequestOutput& together) {
  expect_beginning(alone, together);
  ASSERT_EQ(alone.token_ids.size(), together.token_ids.size());
  ASSERT_EQ(alone.finish_reason, together.finish_reason) << together.error;
  ASSERT_EQ(alone.stop_reason, together.stop_reason);
  ASSERT_EQ(alone.text, together.text);
  ASSERT_EQ(alone.logprobs.size(), together.logprobs.size());
  ASSERT_EQ(alone.prompt_logprobs.size(), together.prompt_logprobs.size());
  expect_same(alone.prompt_logprobs, together.prompt_logprobs, alone.prompt_logprobs.size(),
              "prompt_logprobs");
}

}  // namespace nanovllm
