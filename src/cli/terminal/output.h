// Where results go: standard output or a file, with every write checked.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace nanovllm::cli {

/// Results could not be written: the disk is full, or the reader of a pipe has gone (exit 1).
class OutputError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Writes `text` to standard error. That it cannot be written (its reader has gone, the disk is
/// full) is no error: results are worth more than what is said about them.
void say(std::string_view text);

/// Whether a file is a terminal that obeys escape sequences: one whose TERM is not "dumb".
bool takes_escapes(int descriptor);

class Output {
 public:
  /// Standard output.
  Output();
  /// Opens `path`, and creates or empties it when the first results come or at close(): a run that
  /// ends before that (no such model) leaves the directory as it was. Throws
  /// Error(invalid_argument) naming `option` and the reason.
  Output(const std::string& option, const std::string& path);
  ~Output();
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  /// Adds to what the next flush() writes.
  void write(std::string_view text) { buffer_ += text; }
  /// Writes all that was added; what was added at once stays whole: if a file cannot take all of
  /// it, the part is cut off again, so that the file ends in a complete line. Throws OutputError.
  void flush();
  /// The last flush(), and the errors that a file system reports as late as this. Throws
  /// OutputError.
  void close();

  int descriptor() const { return descriptor_; }

 private:
  [[noreturn]] void fail_with(int error);
  void begin_file();

  std::string name_;
  int descriptor_;
  bool owned_;
  bool begun_ = true;  // the file is there, without its old content
  bool broken_ = false;
  std::string buffer_;
};

/// Results may not go onto a file that the model is read from: an existing file of the directory
/// `model` that is not of JSON lines. Throws Error(invalid_argument) naming `option`.
void refuse_model_file(const std::string& option, const std::string& path,
                       const std::string& model);

}  // namespace nanovllm::cli
