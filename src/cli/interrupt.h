// Ctrl-C and SIGTERM as a question that a loop asks between two steps.
#pragma once

namespace nanovllm::cli {

/// While one lives, the first SIGINT or SIGTERM only makes requested() true; a second ends the
/// process at once. One at a time.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  bool requested() const;  ///< to end; from the first signal on
};

}  // namespace nanovllm::cli
