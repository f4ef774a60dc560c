// A mixture of experts in place of an MLP: a router picks some gated MLPs for each token, and their
// answers are added with the router's weights (Shazeer et al., arXiv 1701.06538).
//
// Tensor parallel: every rank routes all tokens and holds a slice of every expert's inner size, as
// the dense MLP does; the partial results are for RmsNorm::add_forward() to sum over the ranks.
#pragma once

#include <string>

#include "io/model_config.h"
#include "layers/step.h"
#include "weights/weight_loader.h"

namespace nanovllm {

class Experts {
 public:
  /// Checkpoint names `<prefix>.gate.weight` (the router) and
  /// `<prefix>.experts.<i>.{gate,up,down}_proj.weight`.
  Experts(WeightLoader& load, const std::string& prefix, int64_t hidden_size, const MoeConfig& moe);
  /// x [t, hidden] -> x, this rank's part of the sum
  void forward(const Step& step, Tensor x) const;
  /// Adds these experts to the last layer of `stack`.
  void add_to(DecoderStack& stack) const;

 private:
  int64_t num_experts_, experts_per_token_, inner_size_;  // inner_size_: of an expert, on this rank
  bool normalise_;
  Weight router_, gate_up_, down_;
};

}  // namespace nanovllm
