// A file mapped read-only into memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace nanovllm {

/// Owns the mapping and the open file; move-only. The path may be a symbolic link (the Hugging Face
/// cache uses them); replacing the file by renaming another over it does not disturb the mapping.
class MappedFile {
 public:
  /// Throws Error(model) with path and reason: missing, a directory, not readable, empty.
  explicit MappedFile(std::string path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&&) = delete;

  const std::string& path() const { return path_; }
  std::span<const std::byte> bytes() const { return {data_, size_}; }

  /// Gives the pages of `part` back to the page cache, so that they no longer count as this
  /// process's memory. They come back when they are touched again. For bytes that were copied
  /// elsewhere.
  void release(std::span<const std::byte> part) const;

  /// Copies the bytes of the file that are mapped at `from` to `to`, by reading the file: where the
  /// mapping is read, each page costs a fault, and a file cut meanwhile a SIGBUS; here it is
  /// Error(model). Safe from several threads at once.
  void read(std::span<std::byte> to, const std::byte* from) const;

  /// Throws Error(model) if the file was written to or cut since it was mapped. A file cut while
  /// its mapping is read raises SIGBUS, which no check can exclude; this one catches what changed
  /// before or between the reads.
  void check_unchanged() const;

 private:
  std::string path_;
  int fd_ = -1;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
  int64_t modified_ns_ = 0;
};

}  // namespace nanovllm
