// The one exception type of the library. The library never aborts, prints or exits.
#pragma once

#include <stdexcept>
#include <string>

namespace nanovllm {

/// The kind of a failure, coarse enough to choose an exit code or an HTTP status by.
enum class ErrorKind {
  invalid_argument,  ///< a parameter, option, prompt or JSON line is not acceptable (exit 2)
  model,             ///< the model directory cannot be loaded (exit 3)
  device,            ///< no such device, or not enough memory (exit 4)
  engine,            ///< the engine failed while running; it is dead from then on (exit 5)
  unavailable,       ///< not now: a queue is full, or the engine is shutting down (HTTP 503)
};

/// `what()` is one line that names the file, field or option and the remedy (a memory table may
/// follow on further lines for ErrorKind::device). It may be shown in a terminal, whatever files it
/// quotes: control characters of the message are spelled out (\x1b), and of a message of more than
/// 2,000 bytes (8,000 for ErrorKind::device) the middle is left out.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message);
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace nanovllm
