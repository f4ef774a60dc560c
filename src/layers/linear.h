// The parallel linear layers, with nano-vLLM's names. y = x w^T (+ bias).
//
// Column parallel: every rank holds some rows of w, and so some columns of y; no communication. Row
// parallel: every rank holds some columns of w and the matching columns of x; the partial results
// are summed over the ranks with the addition to the residual stream, and only rank 0 adds the
// bias.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "layers/layernorm.h"
#include "layers/step.h"
#include "weights/weight_loader.h"

namespace nanovllm {

/// This rank's rows of a weight and perhaps a bias.
class ColumnParallelLinear {
 public:
  void forward(const Step& step, Tensor y, Tensor x) const;  // [t, input] -> [t, output / world]
  /// Room in step.arena for the result of `rows` rows.
  Tensor take_output(const Step& step, DType dtype, int64_t rows) const {
    return step.arena.take(dtype, {rows, output_size_});
  }
  Weight weight() const { return weight_; }
  Tensor bias() const { return bias_; }  // may be undefined

 protected:
  ColumnParallelLinear() = default;
  Weight weight_;
  Tensor bias_;
  int64_t output_size_ = 0;  // this rank's rows
};

/// Several column-parallel weights in one GEMM: gate and up. This rank's output is [t, sum of sizes
/// / world], part after part.
class MergedColumnParallelLinear : public ColumnParallelLinear {
 public:
  /// (name, output size) of each part; the weights are `<prefix>.<name>.weight`.
  MergedColumnParallelLinear(WeightLoader& load, const std::string& prefix, int64_t input_size,
                             const std::vector<std::pair<std::string, int64_t>>& outputs,
                             bool bias = false);
  /// silu_and_mul() of forward()'s result: [t, input] -> [t, output / 2], in step.arena
  Tensor forward_gated(const Step& step, Tensor x) const;
};

/// q_proj, k_proj and v_proj in one GEMM, split by whole heads. Where there are more ranks than KV
/// heads, ranks share a KV head.
class QKVParallelLinear : public ColumnParallelLinear {
 public:
  QKVParallelLinear(WeightLoader& load, const std::string& prefix, int64_t hidden_size,
                    int64_t head_dim, int64_t num_heads, int64_t num_kv_heads, bool bias = false);
  int64_t num_heads() const { return num_heads_; }        // on this rank
  int64_t num_kv_heads() const { return num_kv_heads_; }  // on this rank

 private:
  int64_t num_heads_, num_kv_heads_;
};

/// This rank's columns of one weight.
class RowParallelLinear {
 public:
  RowParallelLinear(WeightLoader& load, const std::string& prefix, int64_t input_size,
                    int64_t output_size, bool bias, bool may_halve);
  /// y [t, output] = x [t, input / world] w^T: a sum over the ranks is the result. `y` may not be
  /// `x`.
  void forward(const Step& step, Tensor y, Tensor x) const;
  /// residual += the sum of the ranks' x w^T; y = norm(residual). y, residual [t, output].
  void forward_add_norm(const Step& step, Tensor y, Tensor residual, Tensor x,
                        const RmsNorm& norm) const;
  Weight weight() const { return weight_; }
  Tensor bias() const { return bias_; }

 private:
  Weight weight_;
  Tensor bias_;    // on rank 0 only
  bool has_bias_;  // on any
};

/// Heads of K and V on one rank: at least one; refused unless one number divides the other.
int64_t kv_heads_per_rank(int64_t num_kv_heads, int world_size);
/// The first of a rank's heads of K and V.
int64_t first_kv_head(int64_t num_kv_heads, const Shard& shard);

}  // namespace nanovllm
