// One module's quantised weight in a checkpoint: its tensors, checked in full, and its numbers; or
// a plain one that is quantised as it is read.
// w = scale * (q - zero), computed in f32 and rounded once to what it is stored as
// (docs/contract.md).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/weight.h"
#include "io/quantised/quantization.h"
#include "io/safetensors/checkpoint.h"

namespace nanovllm {

/// Rows and columns of a weight [n, k].
struct WeightBlock {
  int64_t row_begin = 0, row_end = 0, col_begin = 0, col_end = 0;
  int64_t rows() const { return row_end - row_begin; }
  int64_t cols() const { return col_end - col_begin; }
};

class QuantizedWeight {
 public:
  /// Throws Error(model) naming the tensor: one that `scheme` needs is missing, or has another
  /// dtype or shape, or g_idx does not fill the groups. `checkpoint` must outlive this.
  QuantizedWeight(const Checkpoint& checkpoint, const std::string& module,
                  const QuantScheme& scheme, int64_t n, int64_t k);

  /// Whether the checkpoint has this module's weight quantised.
  static bool is_in(const Checkpoint& checkpoint, const std::string& module,
                    const QuantScheme& scheme);

  /// The tensors that it is made of.
  const std::vector<std::string>& names() const { return names_; }
  /// The scale of the rows that meet it; 0 where the checkpoint has none.
  float input_scale() const { return input_scale_; }

  /// The numbers of `block`, row-major, as f32 or bf16; read from the file, not through its
  /// mapping. May be called from several threads. Throws Error(model) naming the tensor: a scale
  /// that is not finite and above 0, a weight that is NaN, a zero point that the scheme lacks.
  void dequantise(std::byte* to, DType dtype, const WeightBlock& block) const;
  /// The same as they are stored: rows [first, first + block.rows()) of `to`, in the scheme's
  /// kept_format() or that for plain rows.
  void copy_rows(QuantizedRows& to, int64_t first, const WeightBlock& block) const;

 private:
  static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
  struct Place {  // a stored [rows, cols], of which an element has `size` bytes
    std::string name;
    const StoredTensor* tensor = nullptr;
    int64_t cols = 1;
    size_t size = 0;
  };
  Place take(const std::string& name, std::vector<std::string> dtypes,
             std::vector<std::vector<int64_t>> shapes, int64_t cols);
  std::vector<std::byte> read(const Place& place, const WeightBlock& block) const;
  std::vector<float> read_floats(const Place& place, const WeightBlock& block) const;
  void take_packed(int64_t n, int64_t k);
  void take_transposed(int64_t n, int64_t k);
  void take_bytes(int64_t n, int64_t k);
  void read_order(int64_t k);
  int64_t group_of(int64_t column) const;  // from here on: quantized_numbers.cpp
  int64_t run_from(int64_t column) const;
  std::vector<float> read_scales(const WeightBlock& block) const;
  std::vector<uint8_t> integers(const WeightBlock& block) const;
  std::vector<float> group_scales(const WeightBlock& block) const;
  std::vector<float> group_zeros(const WeightBlock& block) const;
  struct Stored {
    std::vector<uint8_t> numbers;      // of the block, a byte each
    std::vector<float> scales, zeros;  // [rows of the block, groups]
  };
  Stored stored(const WeightBlock& block) const;    // this one and the next: quantize.cpp
  Stored quantise(const WeightBlock& block) const;  // the same of a plain weight
  template <class T>
  void dequantise(T* to, const WeightBlock& block) const;

  const Checkpoint* checkpoint_;
  std::string module_;
  QuantScheme scheme_;
  int64_t n_, k_, groups_ = 1;
  int per_word_;
  Place numbers_, scales_, zeros_;
  bool zeros_are_bytes_ = false;
  float input_scale_ = 0;
  std::vector<int32_t> order_;  // of each column, its group
  std::vector<std::string> names_;
};

}  // namespace nanovllm
