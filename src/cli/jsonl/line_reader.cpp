#include "cli/jsonl/line_reader.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/check.h"

namespace nanovllm::cli {
namespace {

constexpr size_t kChunk = size_t{256} << 10;

bool is_blank(const std::string& line) {
  return std::all_of(line.begin(), line.end(),
                     [](char c) { return c == ' ' || c == '\t' || c == '\r'; });
}

}  // namespace

LineReader::LineReader(const std::string& option, const std::string& path)
    : name_(option + " " + path), path_(path), descriptor_(STDIN_FILENO) {
  if (path == "-") return;
  descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  check(descriptor_ >= 0, ErrorKind::invalid_argument, "{}: cannot be read: {}", name_,
        std::strerror(errno));
  struct stat status {};
  if (::fstat(descriptor_, &status) == 0 && S_ISDIR(status.st_mode)) {
    ::close(descriptor_);
    fail(ErrorKind::invalid_argument, "{}: is a directory, not a file of JSON lines", name_);
  }
}

LineReader::~LineReader() {
  if (descriptor_ > STDIN_FILENO) ::close(descriptor_);
}

LineReader::Result LineReader::take_line(std::string& line, size_t end) {
  line.assign(buffer_, begin_, end - begin_);
  begin_ = searched_ = std::min(end + 1, buffer_.size());
  ++line_number_;
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
  if (line_number_ == 1 && line.starts_with(kByteOrderMark)) line.erase(0, kByteOrderMark.size());
  if (!skipping_) return Result::line;
  skipping_ = false;
  line.clear();
  return Result::too_long;
}

LineReader::Result LineReader::next(std::string& line, bool wait, int wake) {
  for (size_t chunks = 0; chunks <= kMaxLine / kChunk;) {
    const size_t end = buffer_.find('\n', searched_);
    if (end != std::string::npos || (ended_ && begin_ < buffer_.size())) {
      const Result result = take_line(line, std::min(end, buffer_.size()));
      if (result == Result::line && is_blank(line)) continue;
      return result;
    }
    if (ended_) return Result::end_of_file;
    searched_ = buffer_.size();
    if (begin_ == buffer_.size() || begin_ >= kChunk) {
      buffer_.erase(0, begin_);
      searched_ -= begin_;
      begin_ = 0;
    }
    if (buffer_.size() - begin_ > kMaxLine) {
      skipping_ = true;
      buffer_.resize(begin_);
      searched_ = begin_;
    }
    if (!may_read(wait, wake)) return Result::not_yet;
    read_chunk();
    ++chunks;
  }
  return Result::not_yet;
}

/// A signal's wake-up counts before what there is to read: a pipe may never be empty.
bool LineReader::may_read(bool wait, int wake) const {
  pollfd polls[] = {{descriptor_, POLLIN, 0}, {wake, POLLIN, 0}};
  if (::poll(polls, 2, wait ? -1 : 0) <= 0) return false;
  return polls[0].revents != 0 && polls[1].revents == 0;
}

void LineReader::read_chunk() {
  const size_t size = buffer_.size();
  buffer_.resize(size + kChunk);
  const ssize_t n = ::read(descriptor_, buffer_.data() + size, kChunk);
  const int error = errno;
  buffer_.resize(size + static_cast<size_t>(std::max<ssize_t>(n, 0)));
  if (n == 0) {
    ended_ = true;
    // A last line that was too long to keep still has to be reported.
    if (skipping_ && begin_ == buffer_.size()) buffer_ += ' ';
  }
  if (n < 0 && error != EINTR && error != EAGAIN)
    fail(ErrorKind::invalid_argument, "{}: cannot be read: {}", name_, std::strerror(error));
}

bool LineReader::is_regular_file() const {
  struct stat status {};
  return ::fstat(descriptor_, &status) == 0 && S_ISREG(status.st_mode);
}

int64_t LineReader::count_lines() const {
  if (path_ == "-" || !is_regular_file()) return -1;
  std::ifstream file(path_, std::ios::binary);
  std::string chunk(kChunk, '\0');
  int64_t lines = 0;
  bool blank = true;
  while (file) {
    file.read(chunk.data(), static_cast<std::streamsize>(chunk.size()));
    for (std::streamsize i = 0; i < file.gcount(); ++i) {
      const char c = chunk[static_cast<size_t>(i)];
      if (c == '\n') {
        lines += blank ? 0 : 1;
        blank = true;
      } else if (c != ' ' && c != '\t' && c != '\r') {
        blank = false;
      }
    }
  }
  return lines + (blank ? 0 : 1);
}

std::string read_standard_input() {
  std::string text;
  while (true) {
    const size_t size = text.size();
    text.resize(size + kChunk);
    const ssize_t n = ::read(STDIN_FILENO, text.data() + size, kChunk);
    const int error = errno;
    text.resize(size + static_cast<size_t>(std::max<ssize_t>(n, 0)));
    check(n >= 0 || error == EINTR, ErrorKind::invalid_argument,
          "standard input: cannot be read: {}", std::strerror(error));
    check(text.size() <= kMaxTextBytes, ErrorKind::invalid_argument,
          "standard input has more than {} MiB: give a shorter text", kMaxTextBytes >> 20);
    if (n == 0) return text;
  }
}

}  // namespace nanovllm::cli
