// Ctrl-C and SIGTERM as a question that a loop asks between two steps.
#pragma once

namespace nanovllm::cli {

/// While one lives, the first SIGINT or SIGTERM only makes requested() true and, where standard
/// error is a terminal, says so; a second one before take() ends the process at once. One at a
/// time.
class Interrupt {
 public:
  /// `notice` is written when the first signal comes: the step that runs may still take a while.
  explicit Interrupt(const char* notice = "");
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  bool requested() const { return signal() != 0; }  ///< to end; from the first signal on
  int signal() const;                               ///< the first one's number; 0 before
  /// Readable from the first signal on: a wait for input that polls it, too, misses no signal.
  int descriptor() const { return wake_; }
  /// The same as signal(), which is 0 from here on, until the next one comes; then with `notice`.
  int take(const char* notice = "");

 private:
  int wake_;
};

/// Of a run whose results are on their way.
inline constexpr const char* kStopping = "\nstopping; Ctrl-C again ends at once\n";

}  // namespace nanovllm::cli
