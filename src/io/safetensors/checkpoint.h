// The weights of a Hugging Face model directory: model.safetensors, or the shards that
// model.safetensors.index.json names.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "io/safetensors/safetensors.h"

namespace nanovllm {

/// All tensors of a directory by name, mapped read-only. Immutable: reading from several threads is
/// fine.
class Checkpoint {
 public:
  /// Throws Error(model): no weights, pickle weights only, a missing or damaged shard, or a tensor
  /// that is in two of them.
  explicit Checkpoint(const std::string& directory);

  /// Null if there is no such tensor. O(1).
  const StoredTensor* find(std::string_view name) const;
  /// In the order of the shards and of the bytes in them: reading in this order reads the disk
  /// forwards.
  const std::vector<std::string>& names() const { return names_; }
  const std::string& directory() const { return directory_; }
  /// Sum over all tensors.
  size_t bytes() const { return bytes_; }
  /// Where the tensor lies, for messages: the path of its file.
  const std::string& file_of(std::string_view name) const;

  /// Copies `to.size()` bytes of a tensor that start at `from` to `to`, read from the file, not
  /// through the mapping. Throws Error(model) if the file cannot be read or was cut.
  void read(std::span<std::byte> to, const std::byte* from) const;
  /// Tells the system that the bytes of `name` were copied and need not stay in this process's
  /// memory.
  void release(std::string_view name) const;
  /// To be called after the last read: throws Error(model) if a file changed meanwhile.
  void check_unchanged() const;

 private:
  struct Place {
    size_t file, tensor;
  };
  void open_shards(const std::string& directory, const std::string& index_path);
  void add_file(SafetensorsFile file);
  const Place* place_of(std::string_view name) const;

  std::string directory_;
  std::vector<SafetensorsFile> files_;
  std::vector<std::string> names_;
  std::unordered_map<std::string, Place> places_;
  size_t bytes_ = 0;
};

}  // namespace nanovllm
