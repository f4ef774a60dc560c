// The penalties of tokens that a sequence has already, as Hugging Face
// (RepetitionPenaltyLogitsProcessor) and OpenAI (frequency and presence) define them, in vLLM's
// order.
#pragma once

#include <cstdint>

namespace nanovllm {

struct Penalties {
  float repetition = 1, frequency = 0, presence = 0;

  constexpr bool none() const { return repetition == 1 && frequency == 0 && presence == 0; }
  /// The logit of a token that the sequence has, `count` times of them in its answer.
  constexpr float apply(float logit, uint32_t count) const {
    logit = logit > 0 ? logit / repetition : logit * repetition;
    if (count == 0) return logit;
    logit -= frequency * static_cast<float>(count);
    return logit - presence;
  }
};

}  // namespace nanovllm
