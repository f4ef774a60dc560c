// SamplingBatch: how the rows of a logits tensor are sampled. A parameter that rows have is a
// column here and a line in each function below; whatever copies, cuts or moves the columns asks
// tensors().
#pragma once

#include <algorithm>
#include <array>

#include "nanovllm/params.h"

#include "core/tensor.h"

namespace nanovllm {

/// What some row of a step asks for. Together they decide which operations run: they are the key of
/// a recorded step, and say which kernels may serve it.
enum SamplingFeature : uint32_t {
  kSampleRandom = 1,    ///< a temperature
  kSampleFiltered = 2,  ///< and, with it, top_k, top_p or min_p
  kSampleMasked = 4,    ///< tokens that may not be sampled
  kSampleLogprobs = 8,  ///< log probabilities
};

/// Every tensor has one entry per row, on the device.
struct SamplingBatch {
  Tensor temperature;     // f32; 0: greedy
  Tensor top_k;           // i32; 0: off
  Tensor top_p;           // f32; 1: off
  Tensor min_p;           // f32; 0: off
  Tensor seed;            // i64, taken as unsigned
  Tensor position;        // i32: index in its sequence of the token that is to be sampled
  uint32_t features = 0;  // SamplingFeature, of all rows together

  struct Column {
    Tensor* tensor;
    DType dtype;
  };
  std::array<Column, 6> tensors() {
    return {{{&temperature, DType::f32},
             {&top_k, DType::i32},
             {&top_p, DType::f32},
             {&min_p, DType::f32},
             {&seed, DType::i64},
             {&position, DType::i32}}};
  }
  bool has(SamplingFeature feature) const { return (features & feature) != 0; }

  /// Fills row `i` of columns on the host, and adds what it asks for to `features`.
  void set_row(int64_t i, const SamplingParams& params, uint64_t row_seed, int64_t row_position) {
    const bool random = params.temperature >= kLowestTemperature;
    temperature.ptr<float>()[i] = random ? static_cast<float>(params.temperature) : 0.0f;
    top_k.ptr<int32_t>()[i] = static_cast<int32_t>(std::clamp<int64_t>(params.top_k, 0, INT32_MAX));
    top_p.ptr<float>()[i] = static_cast<float>(params.top_p);
    min_p.ptr<float>()[i] = static_cast<float>(params.min_p);
    seed.ptr<int64_t>()[i] = static_cast<int64_t>(row_seed);
    position.ptr<int32_t>()[i] = static_cast<int32_t>(row_position);
    if (random) features |= kSampleRandom;
    if (random && (params.top_k > 0 || params.top_p < 1 || params.min_p > 0))
      features |= kSampleFiltered;
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
