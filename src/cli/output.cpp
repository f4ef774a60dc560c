#include "cli/output.h"

#include <cerrno>
#include <cstdio>
#include <cstring>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/check.h"

namespace nanovllm::cli {

void say(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

Output::Output() : name_("standard output"), descriptor_(STDOUT_FILENO), owned_(false) {}

Output::Output(const std::string& option, const std::string& path)
    : name_(path),
      descriptor_(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666)),
      owned_(true),
      has_old_content_(true) {
  check(descriptor_ >= 0, ErrorKind::invalid_argument,
        "{} {}: cannot be written: {}; give a file in a directory that exists and is writable",
        option, path, std::strerror(errno));
}

Output::~Output() {
  if (owned_ && descriptor_ >= 0) ::close(descriptor_);
}

void Output::fail_with(int error) {
  broken_ = true;
  throw OutputError(fmt::format("{}: cannot be written: {}; the results so far are kept", name_,
                                std::strerror(error)));
}

void Output::drop_old_content() {
  // Only a file can be cut; pipes and devices have no old content.
  if (has_old_content_ && ::ftruncate(descriptor_, 0) != 0 && errno != EINVAL) fail_with(errno);
  has_old_content_ = false;
}

void Output::flush() {
  if (broken_ || buffer_.empty()) return;
  drop_old_content();
  struct stat status {};
  const bool is_file = ::fstat(descriptor_, &status) == 0 && S_ISREG(status.st_mode);
  const off_t begin = is_file ? ::lseek(descriptor_, 0, SEEK_CUR) : -1;
  size_t written = 0;
  while (written < buffer_.size()) {
    const ssize_t n = ::write(descriptor_, buffer_.data() + written, buffer_.size() - written);
    if (n >= 0) {
      written += static_cast<size_t>(n);
    } else if (errno != EINTR) {
      const int error = errno;
      const size_t whole = buffer_.rfind('\n', written == 0 ? 0 : written - 1);
      const size_t keep = whole == std::string::npos || written == 0 ? 0 : whole + 1;
      if (begin >= 0 && ::ftruncate(descriptor_, begin + static_cast<off_t>(keep)) != 0) {
        // The broken line stays; the error below is about the same file.
      }
      fail_with(error);
    }
  }
  buffer_.clear();
}

void Output::close() {
  flush();
  if (!owned_ || descriptor_ < 0) return;
  if (!broken_) drop_old_content();
  const int result = ::close(descriptor_);
  descriptor_ = -1;
  if (result != 0) fail_with(errno);
}

}  // namespace nanovllm::cli
