#include "bench/roofline/roofline.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/batch.h"
#include "models/model.h"
#include "ops/null_backend.h"

namespace nanovllm::cli {
namespace {

/// A device that multiplies by weights of any format.
class AnyFormat final : public NullBackend {
 public:
  bool keeps(WeightFormat, int64_t, int64_t, bool) const override { return true; }
};

}  // namespace

double bytes_of(const Weight& weight) {
  if (weight.format.rows != WeightFormat::Rows::group) return double(weight.bytes());
  const int64_t blocks = (weight.n() + kRowGroup - 1) / kRowGroup;
  return double(weight.count() *
                (weight.n() * weight.k() +
                 blocks * weight.format.groups(weight.k()) * int64_t{sizeof(float)}));
}

DType dtype_named(std::string_view name) {
  for (const DType dtype : {DType::f32, DType::e4m3})
    if (name == name_of(dtype)) return dtype;
  return DType::bf16;
}

WeightReads count_reads(const ModelConfig& config, DType dtype) {
  AnyFormat ops;
  WeightLoader counter(ops, dtype, {}, nullptr, config.quantization.get());
  find_architecture(config.architecture).make(config, {counter, {}});
  WeightReads reads;
  int64_t vectors = counter.num_parameters();
  counter.for_each_matrix([&](const std::string& name, const Weight& weight) {
    const int64_t parameters = weight.n() * weight.k();
    vectors -= parameters;
    const bool is_table = name.find("embed_tokens") != name.npos;
    if (is_table && !config.tie_word_embeddings) {
      reads.embeddings += parameters;
      return;
    }
    WeightReads::Part& part = is_table || name.starts_with("lm_head") ? reads.head
                              : name.find(".experts.") != name.npos   ? reads.experts
                                                                      : reads.layers;
    part.parameters += parameters;
    part.quantising_rows += weight.format.quantises_rows() ? parameters : 0;
    part.bytes += bytes_of(weight);
  });
  reads.layers.parameters += vectors;
  reads.layers.bytes += double(vectors) * double(size_of(dtype));
  return reads;
}

Roofline::Roofline(const ModelConfig& c, const WeightReads& weights, DType cache_dtype, Rates rates,
                   int ranks)
    : rate_bytes_(rates.bytes_per_second * ranks),
      rate_flops_(rates.flops * ranks),
      rate_quantised_(rates.quantised_flops > 0 ? rates.quantised_flops * ranks : rate_flops_),
      weights_(weights),
      layers_(c.num_hidden_layers),
      attention_width_(c.num_attention_heads * c.head_dim),
      chosen_share_(c.moe ? double(c.moe->num_experts_per_tok) / double(c.moe->num_experts) : 0),
      kv_bytes_(2.0 * double(c.num_hidden_layers * c.num_key_value_heads) *
                double(kv_row_bytes(cache_dtype, c.head_dim))) {}

double Roofline::layer_bytes(double tokens) const {
  return weights_.layers.bytes + weights_.experts.bytes * (1 - std::pow(1 - chosen_share_, tokens));
}

double Roofline::seconds_of(const WeightReads::Part& part) const {
  return 2 * (double(part.parameters - part.quantising_rows) / rate_flops_ +
              double(part.quantising_rows) / rate_quantised_);
}

double Roofline::layer_seconds() const {
  return seconds_of(weights_.layers) + seconds_of(weights_.experts) * chosen_share_;
}

double Roofline::decode_step(int64_t batch, int64_t context) const {
  return std::max(layer_bytes(double(batch)) / rate_bytes_, double(batch) * layer_seconds()) +
         std::max(weights_.head.bytes / rate_bytes_, double(batch) * seconds_of(weights_.head)) +
         double(context) * kv_bytes_ / rate_bytes_;
}

double Roofline::decode_bytes(int64_t batch, int64_t context) const {
  return layer_bytes(double(batch)) + weights_.head.bytes + double(context) * kv_bytes_;
}

double Roofline::prefill(std::span<const int64_t> prompt_lens) const {
  double tokens = 0, pairs = 0;  // pairs: of a query and a key that it sees
  for (int64_t n : prompt_lens) {
    tokens += double(n);
    pairs += double(n) * double(n + 1) / 2;
  }
  const double linear =
      tokens * layer_seconds() + double(prompt_lens.size()) * seconds_of(weights_.head);
  const double attention = 4.0 * double(layers_) * double(attention_width_) * pairs;
  return std::max(linear, (layer_bytes(tokens) + weights_.head.bytes) / rate_bytes_) +
         attention / rate_flops_ + tokens * kv_bytes_ / rate_bytes_;
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
