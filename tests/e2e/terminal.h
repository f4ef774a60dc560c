// The built program in a terminal of its own: keys in, what a user would see out.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace nanovllm {

class Terminal {
 public:
  /// Starts the built nanovllm, on one CPU thread, in a pseudo-terminal of so many columns and
  /// the kind `term`.
  explicit Terminal(const std::vector<std::string>& arguments, int columns = 80,
                    const char* term = "xterm");
  ~Terminal();
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  void type(const std::string& keys);
  void send(int signal);
  /// Waits until `text` is in what was written since the last wait for, and gives that up to it.
  /// Fails the test after a minute.
  std::string wait_for(const std::string& text);
  /// Everything written until the program ends.
  std::string rest();
  /// Once it has ended: 128 + signal if a signal ended it.
  int exit_code();

 private:
  bool read_some(std::chrono::milliseconds patience);

  int master_ = -1;
  int child_ = -1;
  std::string unseen_;
};

/// The text that was written, without the escape sequences of a terminal.
std::string without_escapes(const std::string& text);

}  // namespace nanovllm
