// SamplingBatch: how the rows of a logits tensor are sampled. A parameter that rows have is a
// column here and a line in each function below; whatever copies, cuts or moves the columns asks
// tensors().
#pragma once

#include <algorithm>
#include <array>

#include "nanovllm/params.h"

#include "core/tensor.h"

namespace nanovllm {

/// A feature that some row of a step asks for. Together they decide which operations run: they
/// are the key of a recorded step, and say which kernels may serve it.
enum SamplingFeature : uint32_t {
  kSampleRandom = 1,        ///< a temperature
  kSampleFiltered = 2,      ///< and, with it, top_k, top_p or min_p
  kSampleBiased = 4,        ///< logits of single tokens that are moved, or masked
  kSampleLogprobs = 8,      ///< log probabilities
  kSamplePenalised = 16,    ///< penalties for the tokens that a sequence has
  kSampleConstrained = 64,  ///< a mask of tokens: its grammar's, or allowed_token_ids
};

/// The place that a row samples for.
struct SampledPlace {
  uint64_t seed = 0;
  int64_t position = 0;           // index in its sequence of the token that is to be sampled
  int64_t num_prompt_tokens = 0;  // of the sequence
  int64_t sequence = 0;           // of the batch: a row of Batch::block_tables
};

/// Every tensor but token_masks has one entry per row, on the device.
struct SamplingBatch {
  Tensor temperature;           // f32; 0: greedy
  Tensor top_k;                 // i32; 0: off
  Tensor top_p;                 // f32; 1: off
  Tensor min_p;                 // f32; 0: off
  Tensor seed;                  // i64, taken as unsigned
  Tensor position;              // i32: index in its sequence of the token that is to be sampled
  Tensor token_mask{};          // i32: its row of token_masks; -1: every token may come
  Tensor repetition_penalty{};  // f32; 1: off
  Tensor frequency_penalty{}, presence_penalty{};  // f32; 0: off
  Tensor num_prompt_tokens{};                      // i32: where in its sequence the answer begins
  Tensor sequence{};                               // i32: the sequence's row of Batch::block_tables
  uint32_t features = 0;                           // SamplingFeature, of all rows together
  // Of no single row: i32 [any, (vocab_size + 31) / 32], bits of the tokens that may come.
  Tensor token_masks{};

  struct Column {
    Tensor* tensor;
    DType dtype;
  };
  std::array<Column, 12> tensors() {
    return {{{&temperature, DType::f32},
             {&top_k, DType::i32},
             {&top_p, DType::f32},
             {&min_p, DType::f32},
             {&seed, DType::i64},
             {&position, DType::i32},
             {&token_mask, DType::i32},
             {&repetition_penalty, DType::f32},
             {&frequency_penalty, DType::f32},
             {&presence_penalty, DType::f32},
             {&num_prompt_tokens, DType::i32},
             {&sequence, DType::i32}}};
  }
  bool has(SamplingFeature feature) const { return (features & feature) != 0; }

  /// Fills row `i` of columns on the host, and adds what it asks for to `features`.
  void set_row(int64_t i, const SamplingParams& params, const SampledPlace& place) {
    const bool random = params.temperature >= kLowestTemperature;
    temperature.ptr<float>()[i] = random ? static_cast<float>(params.temperature) : 0.0f;
    top_k.ptr<int32_t>()[i] = static_cast<int32_t>(std::clamp<int64_t>(params.top_k, 0, INT32_MAX));
    top_p.ptr<float>()[i] = static_cast<float>(params.top_p);
    min_p.ptr<float>()[i] = static_cast<float>(params.min_p);
    seed.ptr<int64_t>()[i] = static_cast<int64_t>(place.seed);
    position.ptr<int32_t>()[i] = static_cast<int32_t>(place.position);
    repetition_penalty.ptr<float>()[i] = static_cast<float>(params.repetition_penalty);
    frequency_penalty.ptr<float>()[i] = static_cast<float>(params.frequency_penalty);
    presence_penalty.ptr<float>()[i] = static_cast<float>(params.presence_penalty);
    num_prompt_tokens.ptr<int32_t>()[i] = static_cast<int32_t>(place.num_prompt_tokens);
    sequence.ptr<int32_t>()[i] = static_cast<int32_t>(place.sequence);
    token_mask.ptr<int32_t>()[i] = -1;
    if (random) features |= kSampleRandom;
    if (random && (params.top_k > 0 || params.top_p < 1 || params.min_p > 0))
      features |= kSampleFiltered;
    if (params.repetition_penalty != 1 || params.frequency_penalty != 0 ||
        params.presence_penalty != 0)
      features |= kSamplePenalised;
  }
  /// The columns of rows begin .. end.
  SamplingBatch rows(int64_t begin, int64_t end) const {
    SamplingBatch part = *this;
    for (const Column& column : part.tensors()) *column.tensor = column.tensor->rows(begin, end);
    return part;
  }

 private:
  static constexpr double kLowestTemperature = 1e-5;  // below: greedy
};

}  // namespace nanovllm
