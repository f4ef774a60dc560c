// Where requests come from: the prompts of the command line, then the lines of the input file.
#pragma once

#include <deque>
#include <memory>
#include <optional>

#include "cli/jsonl/jsonl.h"
#include "cli/jsonl/line_reader.h"

namespace nanovllm::cli {

class RequestSource {
 public:
  /// `input` may be null.
  RequestSource(std::deque<Request> prompts, std::unique_ptr<LineReader> input,
                SamplingDefaults defaults);

  /// The next request, acceptable or not; with `wait`, waits for one as LineReader::next() does.
  /// Nothing: there is none yet, or ended().
  std::optional<Request> next(bool wait, int wake = -1);
  bool ended() const { return prompts_.empty() && !input_; }

  /// All requests of this source, read or not; -1 where it cannot be known.
  int64_t count() const;
  /// From here on a pipe, which may never end, is treated as if it had ended; a file is still read.
  void stop_waiting();

 private:
  std::deque<Request> prompts_;
  std::unique_ptr<LineReader> input_;
  SamplingDefaults defaults_;
  int64_t taken_ = 0;
};

}  // namespace nanovllm::cli
