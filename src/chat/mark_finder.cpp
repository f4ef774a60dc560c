#include "chat/mark_finder.h"

#include <algorithm>
#include <utility>

#include "chat/calls/call_reader.h"

namespace nanovllm {

std::optional<std::string_view> MarkFinder::take(char c, std::string& text) {
  held_ += c;
  while (!held_.empty()) {
    if (is_space(held_.front())) {
      space_ += held_.front();
    } else {
      const auto begun = std::ranges::find_if(
          marks_, [this](std::string_view mark) { return mark.starts_with(held_); });
      if (begun != marks_.end()) {
        if (begun->size() > held_.size()) return std::nullopt;
        space_.clear();
        held_.clear();
        return *begun;
      }
      text += std::exchange(space_, {});
      text += held_.front();
    }
    held_.erase(0, 1);
  }
  return std::nullopt;
}

void MarkFinder::flush(std::string& text) {
  text += std::exchange(space_, {});
  text += std::exchange(held_, {});
}

std::string MarkFinder::take_space() { return std::exchange(space_, {}); }

}  // namespace nanovllm
