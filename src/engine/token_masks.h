// TokenMasks: makes the masks of a step's rows that have a grammar or allowed_token_ids, on the
// caller's thread and, where they are many, on a few more. The forward pass of the step runs
// meanwhile.
#pragma once

#include <memory>
#include <vector>

#include "engine/batch_builder.h"

namespace nanovllm {

class TokenMasks {
 public:
  explicit TokenMasks(const StepLimits& limits);
  ~TokenMasks();

  /// Fills the masks of `input`, which was built of `plan`: num_token_masks rows of
  /// token_mask_words. The tokens of all earlier steps have been processed by now.
  void fill(const Plan& plan, const StepInput& input, std::byte* masks);

 private:
  class Pool;

  const int64_t words_;
  std::vector<const ScheduledSequence*> rows_;  // fill()'s, reused
  std::unique_ptr<Pool> pool_;                  // from the first step on that has many
};

}  // namespace nanovllm
