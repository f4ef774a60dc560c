// Results that finish in any order and are written in the order of their requests.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>

#include "cli/terminal/output.h"

namespace nanovllm::cli {

class OrderedResults {
 public:
  /// A place for the result of the next request.
  int64_t reserve() {
    pending_.emplace_back();
    return first_ + static_cast<int64_t>(pending_.size()) - 1;
  }
  /// The result of the request with that place, once.
  void put(int64_t place, std::string text) {
    bytes_ += text.size();
    pending_[static_cast<size_t>(place - first_)] = std::move(text);
  }
  /// Writes what is complete up to the first result that is still missing.
  void write_to(Output& output) {
    while (!pending_.empty() && pending_.front()) {
      output.write(*pending_.front());
      bytes_ -= pending_.front()->size();
      pending_.pop_front();
      ++first_;
    }
    output.flush();
  }
  /// Whether so many results, or bytes of them, wait for an earlier one that no more requests
  /// should be taken: beyond `most` of them or kMostBytes.
  bool full(size_t most) const { return pending_.size() >= most || bytes_ >= kMostBytes; }
  bool empty() const { return pending_.empty(); }
  /// write_to() would write something.
  bool ready() const { return !pending_.empty() && pending_.front(); }

  static constexpr size_t kMostBytes = size_t{64} << 20;

 private:
  int64_t first_ = 0;  // place of pending_.front()
  size_t bytes_ = 0;   // of the results that are there
  std::deque<std::optional<std::string>> pending_;
};

}  // namespace nanovllm::cli
