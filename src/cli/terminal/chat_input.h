// The messages of a conversation: typed in a terminal, or a line each of a pipe.
#pragma once

#include <memory>
#include <string>

#include "cli/jsonl/line_reader.h"
#include "cli/terminal/interrupt.h"
#include "cli/terminal/line_editor.h"

namespace nanovllm::cli {

class ChatInput {
 public:
  /// `interrupt` must outlive the input.
  explicit ChatInput(Interrupt& interrupt);

  enum class Result {
    message,
    too_long,  ///< a line of a pipe beyond LineReader::kMaxLine
    end,       ///< of the input, or by a signal, which signal() gives
  };
  /// The next message; a line that ends in a backslash goes on in the next. In a terminal Ctrl-C
  /// discards what was typed.
  Result next(std::string& message);
  /// A message that the arrow keys of a terminal will find.
  void remember(const std::string& message);
  /// Asks in the terminal. True for "y" or "yes"; what was typed before the question does not
  /// count.
  bool confirm(const char* question);

  bool is_terminal() const { return is_terminal_; }
  int signal() const { return signal_; }
  int64_t line_number() const { return reader_.line_number(); }

 private:
  Result next_line(bool first, std::string& line);

  Interrupt& interrupt_;
  const bool is_terminal_;
  std::unique_ptr<LineEditor> editor_;
  LineReader reader_{"standard input", "-"};
  int signal_ = 0;
};

}  // namespace nanovllm::cli
