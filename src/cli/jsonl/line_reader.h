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
    not_yet,   ///< no line so far
    end_of_file,
  };
  /// The next line, without its end; blank ones are skipped. With `wait`, waits for a pipe's writer
  /// until a line is there, the pipe ends or the descriptor `wake` can be read (-1: none). However
  /// much there is to skip, it reads no more than kMaxLine at a time. Throws
  /// Error(invalid_argument) if reading fails.
  Result next(std::string& line, bool wait, int wake = -1);

  /// Number of the line that next() gave last, from 1.
  int64_t line_number() const { return line_number_; }
  int descriptor() const { return descriptor_; }
  /// Lines of a regular file that are not empty, by reading it once more; -1 for a pipe.
  int64_t count_lines() const;
  bool is_regular_file() const;

  static constexpr size_t kMaxLine = size_t{64} << 20;

 private:
  Result take_line(std::string& line, size_t end);
  bool may_read(bool wait, int wake) const;
  void read_chunk();

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

/// The most that is read as one text: encoding takes many times its bytes.
inline constexpr size_t kMaxTextBytes = size_t{64} << 20;
/// All of standard input. Throws Error(invalid_argument) if it cannot be read or has more than
/// kMaxTextBytes.
std::string read_standard_input();

}  // namespace nanovllm::cli
