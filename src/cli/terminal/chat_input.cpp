#include "cli/terminal/chat_input.h"

#include <csignal>

#include <termios.h>
#include <unistd.h>

#include "cli/terminal/output.h"

namespace nanovllm::cli {

ChatInput::ChatInput(Interrupt& interrupt)
    : interrupt_(interrupt), is_terminal_(::isatty(STDIN_FILENO) != 0) {
  if (is_terminal_ && ::isatty(STDERR_FILENO)) editor_ = std::make_unique<LineEditor>(interrupt);
}

ChatInput::Result ChatInput::next(std::string& message) {
  message.clear();
  for (bool first = true;; first = false) {
    std::string line;
    const Result result = next_line(first, line);
    if (result == Result::end && !message.empty() && signal_ == 0) return Result::message;
    if (result != Result::message) return result;
    if (interrupt_.requested()) {  // Ctrl-C in a terminal
      say(line.empty() && message.empty() ? "\n/exit or Ctrl-D ends\n" : "^C\n");
      interrupt_.take();
      message.clear();
      return Result::message;
    }
    const bool continues = line.ends_with('\\');
    if (continues) line.back() = '\n';
    message += line;
    if (!continues) return Result::message;
  }
}

ChatInput::Result ChatInput::next_line(bool first, std::string& line) {
  const auto ended_by_signal = [&] {
    return interrupt_.signal() == SIGTERM || (interrupt_.requested() && !editor_);
  };
  LineReader::Result read = LineReader::Result::not_yet;
  while (!editor_ && read == LineReader::Result::not_yet && !ended_by_signal())
    read = reader_.next(line, /*wait=*/true, interrupt_.descriptor());
  if (editor_ && editor_->read(first ? "> " : "  ", line) == LineEditor::Result::end)
    return Result::end;
  if (ended_by_signal()) {
    signal_ = interrupt_.signal();
    return Result::end;
  }
  if (editor_) return Result::message;
  if (read == LineReader::Result::end_of_file) return Result::end;
  if (read == LineReader::Result::too_long) return Result::too_long;
  if (line.ends_with('\r')) line.pop_back();
  return Result::message;
}

void ChatInput::remember(const std::string& message) {
  if (editor_) editor_->remember(message);
}

bool ChatInput::confirm(const char* question) {
  if (!editor_) return false;
  ::tcflush(STDIN_FILENO, TCIFLUSH);
  std::string answer;
  const LineEditor::Result result = editor_->read(question, answer);
  if (result != LineEditor::Result::text) say("\n");
  return result == LineEditor::Result::text && (answer == "y" || answer == "yes");
}

}  // namespace nanovllm::cli
