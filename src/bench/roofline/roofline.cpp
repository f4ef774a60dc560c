#include "bench/roofline/roofline.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace nanovllm::cli {

Roofline::Roofline(const ModelConfig& c, int bytes_per_value, Rates rates, int ranks)
    : rate_bytes_(rates.bytes_per_second * ranks),
      rate_flops_(rates.flops * ranks),
      bytes_per_value_(bytes_per_value),
      layers_(c.num_hidden_layers),
      attention_width_(c.num_attention_heads * c.head_dim),
      head_parameters_(c.vocab_size * c.hidden_size),
      tied_(c.tie_word_embeddings),
      kv_bytes_(2.0 * double(c.num_hidden_layers * c.num_key_value_heads * c.head_dim) *
                bytes_per_value) {
  const int64_t h = c.hidden_size;
  const int64_t qkv = h * (c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim;
  const int64_t o = attention_width_ * h;
  const int64_t qk_norms = c.architecture.starts_with("Qwen3") ? 2 * c.head_dim : 0;
  layer_parameters_ = layers_ * (qkv + o + 2 * h + qk_norms) + h;
  for (int64_t layer = 0; layer < layers_; ++layer) {
    if (!c.moe || !c.moe->is_sparse(layer)) {
      layer_parameters_ += 3 * h * c.intermediate_size;
      continue;
    }
    layer_parameters_ += h * c.moe->num_experts;  // the router
    expert_parameters_ += 3 * h * c.moe->moe_intermediate_size * c.moe->num_experts;
    chosen_share_ = double(c.moe->num_experts_per_tok) / double(c.moe->num_experts);
  }
}

double Roofline::layers_read(double tokens) const {
  return double(layer_parameters_) +
         double(expert_parameters_) * (1 - std::pow(1 - chosen_share_, tokens));
}

double Roofline::layers_active() const {
  return double(layer_parameters_) + double(expert_parameters_) * chosen_share_;
}

double Roofline::decode_step(int64_t batch, int64_t context) const {
  const auto product = [&](double read, double active) {
    return std::max(read * bytes_per_value_ / rate_bytes_,
                    2.0 * double(batch) * active / rate_flops_);
  };
  return product(layers_read(double(batch)), layers_active()) +
         product(double(head_parameters_), double(head_parameters_)) +
         double(context) * kv_bytes_ / rate_bytes_;
}

double Roofline::prefill(std::span<const int64_t> prompt_lens) const {
  double tokens = 0, pairs = 0;  // pairs: of a query and a key that it sees
  for (int64_t n : prompt_lens) {
    tokens += double(n);
    pairs += double(n) * double(n + 1) / 2;
  }
  const double linear =
      2 * tokens * layers_active() + 2 * double(prompt_lens.size()) * double(head_parameters_);
  const double attention = 4.0 * double(layers_) * double(attention_width_) * pairs;
  const double weights = (layers_read(tokens) + double(head_parameters_)) * bytes_per_value_;
  return std::max(linear / rate_flops_, weights / rate_bytes_) + attention / rate_flops_ +
         tokens * kv_bytes_ / rate_bytes_;
}

double Roofline::offline(std::span<const int64_t> prompt_lens,
                         std::span<const int64_t> output_lens) const {
  std::vector<size_t> by_output(prompt_lens.size());
  for (size_t i = 0; i < by_output.size(); ++i) by_output[i] = i;
  std::sort(by_output.begin(), by_output.end(),
            [&](size_t a, size_t b) { return output_lens[a] < output_lens[b]; });
  double seconds = prefill(prompt_lens);
  int64_t active = static_cast<int64_t>(prompt_lens.size()), context = 0;
  for (int64_t n : prompt_lens) context += n;
  int64_t steps = 0;  // decode steps done so far
  for (size_t i : by_output) {
    for (; steps + 1 < output_lens[i]; ++steps)
      seconds += decode_step(active, context + active * (steps + 1));
    --active;
    context -= prompt_lens[i];
  }
  return seconds;
}

}  // namespace nanovllm::cli
