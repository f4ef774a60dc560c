// Lines of a file or pipe, one at a time, whatever the size of the whole.
#pragma once

#include <cstdint>
#include <string>

namespace nanovllm::cli {

class LineReader {
 public:
  /// Opens `path`, "-" being standard input. Throws Error(invalid_argument) naming `option`.
  LineReader(const std::string& option, const std::string& path);
  ~LineReader();
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;

  enum class Result {
    line,
    too_long,  ///< longer than kMaxLine; it was skipped
    not_yet,   ///< nothing to read at the moment, or a signal came
    end_of_file,
  };
  /// The next line, without its end. With `wait`, waits for a pipe's writer until a line is there,
  /// the pipe ends or a signal comes. Throws Error(invalid_argument) if reading fails.
  Result next(std::string& line, bool wait);

  /// Number of the line that next() gave last, from 1.
  int64_t line_number() const { return line_number_; }
  int descriptor() const { return descriptor_; }
  /// Lines of a regular file that are not empty, by reading it once more; -1 for a pipe.
  int64_t count_lines() const;

  static constexpr size_t kMaxLine = size_t{64} << 20;

 private:
  Result take_line(std::string& line, size_t end);

  std::string name_;
  std::string path_;
  int descriptor_;
  std::string buffer_;
  size_t begin_ = 0;     // where the next line starts in buffer_
  size_t searched_ = 0;  // buffer_[begin_, searched_) has no line end
  bool skipping_ = false;
  bool ended_ = false;
  int64_t line_number_ = 0;
};

}  // namespace nanovllm::cli
