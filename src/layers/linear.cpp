#include "layers/linear.h"

namespace nanovllm {
namespace {

/// The rows begin .. end of a weight and its bias.
struct Rows {
  std::string prefix;
  int64_t total, begin, end;
};

/// Weight and bias of one or more stacked column-parallel parts.
std::pair<Weight, Tensor> load_rows(WeightLoader& load, const std::vector<Rows>& parts,
                                    int64_t input_size, bool bias) {
  std::vector<WeightPart> weights, biases;
  int64_t n = 0;
  for (const Rows& part : parts) {
    weights.push_back({part.prefix + ".weight", {part.total, input_size}, part.begin, part.end});
    biases.push_back({part.prefix + ".bias", {part.total}, part.begin, part.end});
    n += part.end - part.begin;
  }
  const Weight weight = load.linear(std::move(weights), n, input_size);
  return {weight, bias ? load.vector(std::move(biases), n) : Tensor{}};
}

}  // namespace

void ColumnParallelLinear::forward(const Step& step, Tensor y, Tensor x) const {
  step.ops.gemm(y, x, weight_);
  if (bias_.defined()) step.ops.add_bias(y, bias_);
}

MergedColumnParallelLinear::MergedColumnParallelLinear(
    WeightLoader& load, const std::string& prefix, int64_t input_size,
    const std::vector<std::pair<std::string, int64_t>>& outputs, bool bias) {
  std::vector<Rows> parts;
  for (const auto& [name, size] : outputs) {
    const std::string part = prefix + "." + name;
    const int64_t rows = load.shard().divide(size, part.c_str()), begin = load.shard().rank * rows;
    parts.push_back({part, size, begin, begin + rows});
    output_size_ += rows;
  }
  std::tie(weight_, bias_) = load_rows(load, parts, input_size, bias);
}

Tensor MergedColumnParallelLinear::forward_gated(const Step& step, Tensor x) const {
  Tensor gate_up = step.arena.take(x.dtype, {x.shape[0], output_size_}),
         y = step.arena.take(x.dtype, {x.shape[0], output_size_ / 2});
  if (bias_.defined()) {
    forward(step, gate_up, x);
    step.ops.silu_and_mul(y, gate_up);
  } else {
    step.ops.gemm_silu_and_mul(y, gate_up, x, weight_);
  }
  return y;
}

int64_t kv_heads_per_rank(int64_t num_kv_heads, int world_size) {
  if (num_kv_heads % world_size == 0) return num_kv_heads / world_size;
  check(world_size % num_kv_heads == 0, ErrorKind::invalid_argument,
        "tensor_parallel_size {} does not fit num_key_value_heads {}: one must divide the other",
        world_size, num_kv_heads);
  return 1;
}

int64_t first_kv_head(int64_t num_kv_heads, const Shard& shard) {
  return shard.rank * num_kv_heads / shard.world_size;
}

QKVParallelLinear::QKVParallelLinear(WeightLoader& load, const std::string& prefix,
                                     int64_t hidden_size, int64_t head_dim, int64_t num_heads,
                                     int64_t num_kv_heads, bool bias)
    : num_heads_(load.shard().divide(num_heads, "num_attention_heads")),
      num_kv_heads_(kv_heads_per_rank(num_kv_heads, load.shard().world_size)) {
  const Shard& shard = load.shard();
  const int64_t q_begin = shard.rank * num_heads_ * head_dim, q_rows = num_heads_ * head_dim;
  const int64_t kv_begin = first_kv_head(num_kv_heads, shard) * head_dim,
                kv_rows = num_kv_heads_ * head_dim;
  const int64_t kv_total = num_kv_heads * head_dim;
  output_size_ = q_rows + 2 * kv_rows;
  std::tie(weight_, bias_) =
      load_rows(load,
                {{prefix + ".q_proj", num_heads * head_dim, q_begin, q_begin + q_rows},
                 {prefix + ".k_proj", kv_total, kv_begin, kv_begin + kv_rows},
                 {prefix + ".v_proj", kv_total, kv_begin, kv_begin + kv_rows}},
                hidden_size, bias);
}

RowParallelLinear::RowParallelLinear(WeightLoader& load, const std::string& prefix,
                                     int64_t input_size, int64_t output_size, bool bias,
                                     bool may_halve)
    : has_bias_(bias) {
  weight_ = load.row_parallel(prefix, output_size, input_size, may_halve);
  if (!bias) return;
  if (load.shard().rank == 0)
    bias_ = load.vector({{prefix + ".bias", {output_size}}}, output_size);
  else
    load.ignore(prefix + ".bias");
}

void RowParallelLinear::forward(const Step& step, Tensor y, Tensor x) const {
  step.ops.gemm(y, x, weight_);
  if (bias_.defined()) step.ops.add_bias(y, bias_);
}

void RowParallelLinear::forward_add_norm(const Step& step, Tensor y, Tensor residual, Tensor x,
                                         const RmsNorm& norm) const {
  if (step.comm.world_size() == 1 && !has_bias_)
    return norm.gemm_add_forward(step, y, residual, x, weight_);
  // The part may go to the ranks without having been in y.
  if (has_bias_ || !step.comm.fusions().gemm_for_sum(y, x, weight_)) forward(step, y, x);
  norm.add_forward(step, y, residual);
}

}  // namespace nanovllm
