// WeightLoader: turns what layers ask for into bytes on the device. Layers say, in their
// constructors, which block of which checkpoint tensor they hold; sharding is declared there, next
// to the weight, and nowhere else.
//
// Two passes over the same constructors. Without storage the loader only counts: that is the memory
// plan. With storage it hands out the final addresses, and load() then fills them. Loading is
// exhaustive both ways: a tensor that a layer wants and the checkpoint lacks, or that has another
// shape, and a tensor that no layer asked for are errors that name it.
//
// A weight that the checkpoint quantises stays so where its layer asks for it and the backend can
// multiply by it, with the rows quantised that the checkpoint quantises or, where the backend has
// only that, with plain ones; any other becomes numbers of the model's dtype while it is loaded.
#pragma once

#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/tensor.h"
#include "ops/backend.h"

namespace nanovllm {

class Checkpoint;
class QuantizationConfig;

/// The rank that holds this shard, and how many there are.
struct Shard {
  int rank = 0;
  int world_size = 1;
  /// total / world_size; refused with the numbers if that is not whole. `what` names the quantity.
  int64_t divide(int64_t total, const char* what) const;
  /// total / world_size, rounded up: the last ranks' shares may be padded.
  int64_t share(int64_t total) const { return (total + world_size - 1) / world_size; }
};

/// Rows and columns of one checkpoint tensor of `shape` ([n] or [n, k]). Ends of -1 mean all.
struct WeightPart {
  std::string name;
  std::vector<int64_t> shape;
  int64_t row_begin = 0, row_end = -1;
  int64_t col_begin = 0, col_end = -1;
};

using LoadProgress = std::function<void(int64_t bytes_done, int64_t bytes_total)>;

class WeightLoader {
 public:
  /// `storage` of bytes() bytes, or null for the counting pass. `quantization` is config.json's;
  /// null: the checkpoint is plain. It must outlive this.
  WeightLoader(Backend& backend, DType dtype, Shard shard, std::byte* storage = nullptr,
               const QuantizationConfig* quantization = nullptr)
      : backend_(backend),
        dtype_(dtype),
        shard_(shard),
        storage_(storage),
        quantization_(quantization) {}

  /// A [n, k] operand of gemm() or embedding(): the parts stacked along n, then rows of zeros.
  Weight matrix(std::vector<WeightPart> parts, int64_t n, int64_t k);
  /// An operand of gemm() alone, which may stay quantised.
  Weight linear(std::vector<WeightPart> parts, int64_t n, int64_t k);
  /// This rank's columns of the [n, k] matrix `<prefix>.weight`, an operand of gemm() alone, which
  /// may stay quantised. `may_halve`: nothing is added to its products before they are summed over
  /// the ranks, so that one rank may compute what two would (WeightFormat::in_halves).
  Weight row_parallel(const std::string& prefix, int64_t n, int64_t k, bool may_halve);
  /// A stack [count, n, k] for moe_mlp(), which may stay quantised: parts_of(i) makes up matrix i.
  Weight matrices(int64_t count, const std::function<std::vector<WeightPart>(int64_t i)>& parts_of,
                  int64_t n, int64_t k);
  /// A plain [n] vector in the model's dtype: norm weights, biases.
  Tensor vector(std::vector<WeightPart> parts, int64_t n);
  /// A tensor that checkpoints may carry and this model does not read (a tied head, rotary
  /// buffers). Where there is one, it has to be a copy of `original`.
  void ignore(const std::string& name, std::string original = {}) {
    ignored_[name] = std::move(original);
  }

  /// The matrices so far: the checkpoint's name of the first part, and all of them together.
  void for_each_matrix(
      const std::function<void(const std::string& name, const Weight& weight)>& visit) const;
  const Shard& shard() const { return shard_; }
  DType dtype() const { return dtype_; }
  size_t bytes() const { return used_; }  ///< storage that the parameters so far occupy
  int64_t num_parameters() const { return num_parameters_; }  ///< elements, of this shard

  int64_t num_quantised() const { return num_quantised_; }            ///< of these, kept quantised
  int64_t num_row_quantising() const { return num_row_quantising_; }  ///< of these, so are rows
  /// The most columns of a weight that quantises the rows that it meets; 0: none does.
  int64_t quantised_columns() const { return quantised_columns_; }
  /// The most of a stack of experts that does; 0: none does.
  int64_t quantised_expert_columns() const { return quantised_expert_columns_; }

  /// Fills everything handed out, from a checkpoint. Throws Error(model).
  void load(const Checkpoint& checkpoint, const LoadProgress& progress);
  /// Fills everything with reproducible random numbers: norms 1, biases 0, matrices normal with
  /// sigma 0.02.
  void load_dummy(uint64_t seed, const LoadProgress& progress);

 private:
  struct Parameter {
    Tensor dst;
    std::vector<WeightPart> parts;
    bool is_matrix;
    WeightFormat format;
    size_t first;  // of its stack; of none its own index
  };
  Weight matrix(WeightFormat format, std::vector<WeightPart> parts, int64_t n, int64_t k,
                size_t place_in_stack = 0);
  /// The first of these in which the backend keeps the parts of all matrices: as the checkpoint has
  /// them; that beside plain rows; plain.
  WeightFormat format_of(std::span<const std::vector<WeightPart>> matrices, int64_t n, int64_t k,
                         bool stacked, bool in_halves = false) const;
  /// Where the next parameter of so many bytes goes; null in the counting pass.
  std::byte* place(size_t bytes);
  class CheckpointSources;
  struct Sources {
    std::vector<std::vector<Tensor>> of;   // of each parameter from `first` on
    std::map<size_t, QuantizedRows> rows;  // of those that stay quantised
    size_t first = 0;
  };
  /// Fills the parameters of `sources`; `dropped(i)`: those of parameter i are no longer needed.
  void load(const Sources& sources, const SourceReader& read,
            const std::function<void(size_t)>& dropped, const LoadProgress& progress);
  /// The bytes from parameter i's place to the next one's.
  int64_t bytes_of(size_t i) const;

  Backend& backend_;
  DType dtype_;
  Shard shard_;
  std::byte* storage_;
  const QuantizationConfig* quantization_;
  size_t used_ = 0;
  int64_t num_parameters_ = 0, num_quantised_ = 0, num_row_quantising_ = 0;
  int64_t quantised_columns_ = 0, quantised_expert_columns_ = 0;
  std::vector<Parameter> parameters_;
  std::map<std::string, std::string> ignored_;  // and what they are copies of
};

}  // namespace nanovllm
