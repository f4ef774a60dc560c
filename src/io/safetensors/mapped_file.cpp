#include "io/safetensors/mapped_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/check.h"

namespace nanovllm {
namespace {

int64_t modification_time_ns(const struct stat& status) {
  return static_cast<int64_t>(status.st_mtim.tv_sec) * 1'000'000'000 + status.st_mtim.tv_nsec;
}

}  // namespace

MappedFile::MappedFile(std::string path) : path_(std::move(path)) {
  const auto refuse = [&](std::string_view reason) {
    const int error = errno;
    if (fd_ >= 0) ::close(fd_);
    fail(ErrorKind::model, "{}: {}", path_,
         reason.empty() ? fmt::format("cannot be read: {}", std::strerror(error))
                        : std::string(reason));
  };
  struct stat status {};
  // stat before open: opening a pipe would wait for its writer.
  if (::stat(path_.c_str(), &status) != 0) refuse("");
  if (S_ISDIR(status.st_mode)) refuse("is a directory, expected a file");
  if (!S_ISREG(status.st_mode)) refuse("is not a regular file");
  fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd_ < 0 || ::fstat(fd_, &status) != 0) refuse("");
  if (status.st_size == 0) refuse("is empty");
  size_ = static_cast<size_t>(status.st_size);
  modified_ns_ = modification_time_ns(status);
  void* map = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd_, 0);
  if (map == MAP_FAILED) refuse("");
  data_ = static_cast<const std::byte*>(map);
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
  if (fd_ >= 0) ::close(fd_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      fd_(std::exchange(other.fd_, -1)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      modified_ns_(other.modified_ns_) {}

void MappedFile::release(std::span<const std::byte> part) const {
  // Whole pages only: the first and the last may belong to a neighbour that is still being read.
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const auto offset = static_cast<size_t>(part.data() - data_);
  const size_t begin = (offset + page - 1) / page * page,
               end = (offset + part.size()) / page * page;
  if (begin < end) ::madvise(const_cast<std::byte*>(data_) + begin, end - begin, MADV_DONTNEED);
}

void MappedFile::read(std::span<std::byte> to, const std::byte* from) const {
  constexpr size_t kMost = size_t{1} << 30;  // of one call: Linux reads no more than 2 GiB at once
  auto at = static_cast<off_t>(from - data_);
  while (!to.empty()) {
    const ssize_t n = ::pread(fd_, to.data(), std::min(to.size(), kMost), at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(ErrorKind::model, "{}: cannot be read: {}", path_, std::strerror(errno));
    if (n == 0) {
      check_unchanged();
      fail(ErrorKind::model, "{}: ends at byte {}, before its weights do", path_, at);
    }
    to = to.subspan(static_cast<size_t>(n));
    at += n;
  }
}

void MappedFile::check_unchanged() const {
  struct stat status {};
  if (::fstat(fd_, &status) != 0)
    fail(ErrorKind::model, "{}: cannot be read: {}", path_, std::strerror(errno));
  check(
      static_cast<size_t>(status.st_size) == size_, ErrorKind::model,
      "{}: was {} bytes when it was opened and is {} now: do not change a model while it is loaded",
      path_, size_, status.st_size);
  check(modification_time_ns(status) == modified_ns_, ErrorKind::model,
        "{}: was written to since it was opened: do not change a model while it is loaded", path_);
}

}  // namespace nanovllm
