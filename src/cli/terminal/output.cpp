#include "cli/terminal/output.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

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

bool takes_escapes(int descriptor) {
  const char* kind = std::getenv("TERM");
  return ::isatty(descriptor) != 0 && !(kind && std::string_view(kind) == "dumb");
}

Output::Output() : name_("standard output"), descriptor_(STDOUT_FILENO), owned_(false) {}

Output::Output(const std::string& option, const std::string& path)
    : name_(path),
      descriptor_(::open(path.c_str(), O_WRONLY | O_CLOEXEC)),
      owned_(true),
      begun_(false) {
  int error = descriptor_ < 0 ? errno : 0;
  if (error == ENOENT) {  // to be created: that has to be possible
    const size_t slash = path.rfind('/');
    const std::string directory = slash == path.npos ? "." : path.substr(0, slash + 1);
    error = ::access(directory.c_str(), W_OK | X_OK) == 0 ? 0 : errno;
  }
  check(error == 0, ErrorKind::invalid_argument,
        "{} {}: cannot be written: {}; give a file in a directory that exists and is writable",
        option, path, std::strerror(error));
}

Output::~Output() {
  if (owned_ && descriptor_ >= 0) ::close(descriptor_);
}

void Output::fail_with(int error) {
  broken_ = true;
  throw OutputError(fmt::format("{}: cannot be written: {}; the results so far are kept", name_,
                                std::strerror(error)));
}

void Output::begin_file() {
  if (begun_) return;
  begun_ = true;
  if (descriptor_ < 0)
    descriptor_ = ::open(name_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor_ < 0) fail_with(errno);
  // Only a file can be cut; pipes and devices have no old content.
  if (::ftruncate(descriptor_, 0) != 0 && errno != EINVAL) fail_with(errno);
}

void Output::flush() {
  if (broken_ || buffer_.empty()) return;
  begin_file();
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
  if (!owned_ || broken_) return;
  begin_file();
  const int result = ::close(descriptor_);
  descriptor_ = -1;
  if (result != 0) fail_with(errno);
}

void refuse_model_file(const std::string& option, const std::string& path,
                       const std::string& model) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (path == "-" || path.ends_with(".jsonl") || !fs::exists(path, error)) return;
  for (const auto& file : fs::directory_iterator(model, error))
    check(!fs::equivalent(file.path(), path, error), ErrorKind::invalid_argument,
          "{} {} would overwrite {} of the model: give another file", option, path,
          file.path().filename().string());
}

}  // namespace nanovllm::cli
