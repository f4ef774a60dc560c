// A prompt in a terminal: a line that can be edited, with a history, and pastes of several lines.
#pragma once

#include <memory>
#include <string>

#include "cli/terminal/interrupt.h"

namespace nanovllm::cli {

class LineEditor {
 public:
  /// Standard input and standard error must be terminals. `interrupt` must outlive the editor.
  explicit LineEditor(const Interrupt& interrupt);
  ~LineEditor();
  LineEditor(const LineEditor&) = delete;
  LineEditor& operator=(const LineEditor&) = delete;

  enum class Result {
    text,
    interrupted,  ///< by a signal of `interrupt`; `text` is what had been typed
    end,          ///< Ctrl-D in an empty line
  };
  /// Reads the user's input behind `prompt`: a line, or several where several were pasted. Valid
  /// UTF-8, without the last line end.
  Result read(const char* prompt, std::string& text);
  /// The arrow keys will find it.
  void remember(const std::string& text);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace nanovllm::cli
