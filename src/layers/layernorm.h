// RmsNorm: x / rms(x) * weight, by itself or fused with the residual addition before it (Zhang &
// Sennrich, arXiv 1910.07467).
#pragma once

#include <string>

#include "layers/step.h"
#include "weights/weight_loader.h"

namespace nanovllm {

class RmsNorm {
 public:
  RmsNorm(WeightLoader& load, const std::string& prefix, int64_t size, float eps)
      : weight_(load.vector({{prefix + ".weight", {size}}}, size)), eps_(eps) {}

  /// `reader`: the weight of the product that alone reads add_forward()'s result, and at once.
  void set_reader(Weight reader) { reader_ = reader; }
  /// y = norm(x)
  void forward(const Step& step, Tensor y, Tensor x) const {
    step.ops.rms_norm(y, x, weight_, eps_);
  }
  /// residual += the sum of the ranks' x; x = norm(residual)
  void add_forward(const Step& step, Tensor x, Tensor residual) const {
    const Weight reader = step.halves.rows == 0 ? reader_ : Weight{};  // a product of each half
    if (step.comm.fusions().all_reduce_add_rms_norm(x, residual, weight_, eps_, reader)) return;
    step.comm.all_reduce(x);
    step.ops.add_rms_norm(x, residual, x, weight_, eps_, reader);
  }
  /// residual += x w^T; y = norm(residual), on one rank
  void gemm_add_forward(const Step& step, Tensor y, Tensor residual, Tensor x, Weight w) const {
    step.ops.gemm_add_rms_norm(y, residual, x, w, weight_, eps_, reader_);
  }
  /// add_forward() beside what the backend does until RankFusions::finish_half(half): see
  /// RankFusions::start_add_rms_norm().
  void start_add_forward(const Step& step, int half, Tensor x, Tensor residual, bool whole) const {
    if (!step.comm.fusions().start_add_rms_norm(half, x, residual, weight_, eps_, whole))
      add_forward(step, x, residual);
  }

  Tensor weight() const { return weight_; }
  float eps() const { return eps_; }

 private:
  Tensor weight_;
  float eps_;
  Weight reader_;
};

}  // namespace nanovllm
