// The safetensors format: 8 bytes with the header's length, a JSON header, the bytes of the tensors
// without gaps. The rules are those of the reference implementation (huggingface/safetensors,
// safetensors/src/tensor.rs), and three of our own: no tensor named twice, nothing before the
// opening brace, no dimension beyond int64.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/tensor.h"
#include "io/safetensors/mapped_file.h"

namespace nanovllm {

/// One entry of a safetensors header. `data` points into the file.
struct StoredTensor {
  std::string name;
  std::string dtype;           ///< as the file spells it: "BF16", "F8_E4M3"
  std::vector<int64_t> shape;  ///< row-major, of any rank; empty for a scalar
  std::span<const std::byte> data;

  /// The dtype, if it is one that models are loaded from: F32, F16, BF16.
  std::optional<DType> loadable_dtype() const;
  /// The numbers of `bytes`, which were read from `data`; the dtype is loadable.
  std::vector<float> to_floats(std::span<const std::byte> bytes) const;
  /// A read-only CPU view. Throws Error(model) naming the tensor if the dtype is not loadable or
  /// the rank not 1 to 4.
  Tensor view() const;
  std::string describe() const;  ///< "BF16[12, 1024]"
};

struct SafetensorsContents {
  std::vector<StoredTensor> tensors;  ///< in the order of their bytes
  std::vector<std::pair<std::string, std::string>> metadata;
};

/// Reads the image of a whole file; `what` names it in errors. Throws Error(model) naming the
/// tensor and the numbers.
SafetensorsContents parse_safetensors(std::span<const std::byte> file, std::string_view what);

/// A mapped safetensors file. The tensors live as long as this object.
class SafetensorsFile {
 public:
  /// Throws Error(model): the file cannot be read or breaks a rule of the format.
  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return file_.path(); }
  const std::vector<StoredTensor>& tensors() const { return contents_.tensors; }
  const std::vector<std::pair<std::string, std::string>>& metadata() const {
    return contents_.metadata;
  }

  /// Copies bytes of this file's tensors that start at `from` to `to`, see MappedFile::read; false
  /// if `from` does not lie in the mapping.
  bool read(std::span<std::byte> to, const std::byte* from) const;
  void release(const StoredTensor& tensor) const;  ///< see MappedFile::release
  void check_unchanged() const { file_.check_unchanged(); }

 private:
  void align();
  bool maps(const std::byte* address) const;

  MappedFile file_;
  SafetensorsContents contents_;
  std::vector<Buffer> aligned_copies_;
};

}  // namespace nanovllm
