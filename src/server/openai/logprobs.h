// Log probabilities as OpenAI's clients read them.
#pragma once

#include <string>
#include <vector>

#include "nanovllm/params.h"
#include "nanovllm/tokenizer.h"

#include "io/json.h"

namespace nanovllm::server {

struct LogprobsJson {
  const Tokenizer* tokenizer = nullptr;  ///< null: tokens are named by their ids
  bool tokens_as_ids = false;

  /// {"content": [{"token", "logprob", "bytes", "top_logprobs"}]}
  Json chat(const std::vector<PositionLogprobs>& positions) const;
  /// {"text_offset", "token_logprobs", "tokens", "top_logprobs"}; `offset`, in characters, is
  /// moved on.
  Json completion(const std::vector<int32_t>& ids, const std::vector<PositionLogprobs>& positions,
                  size_t& offset) const;
  /// vLLM's prompt_logprobs: null, then for each token {"5": {"logprob", "rank", "decoded_token"}}.
  Json prompt(const std::vector<PositionLogprobs>& positions) const;

 private:
  std::string token_text(int32_t id) const;
};

}  // namespace nanovllm::server
