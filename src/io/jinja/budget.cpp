#include "io/jinja/budget.h"

#include <algorithm>

#include <fmt/format.h>

namespace nanovllm::jinja {

void Budget::spend(size_t steps) {
  if (steps > limits_.max_steps - steps_) {
    throw RenderError(fmt::format("the template takes more than {} steps", limits_.max_steps));
  }
  steps_ += steps;
}

void Budget::expect_room(size_t bytes) const {
  if (bytes > limits_.max_memory_bytes - held_) {
    throw RenderError(
        fmt::format("the template needs more than {} bytes of memory", limits_.max_memory_bytes));
  }
}

void Budget::hold(size_t bytes) {
  expect_room(bytes);
  held_ += bytes;
}

Budget::Level::Level(Budget& budget) : budget_(budget) {
  if (budget.depth_ >= budget.limits_.max_depth) {
    throw RenderError(
        fmt::format("the template nests deeper than {} levels", budget.limits_.max_depth));
  }
  ++budget.depth_;
}

void TextBuilder::append(size_t count, char c) {
  if (count > capacity_ - text_.size()) reserve(count);
  text_.append(count, c);
}

void TextBuilder::reserve(size_t extra) {
  budget_.expect_room(extra);
  const size_t wanted = std::max(text_.size() + extra, 2 * capacity_);
  held_.grow(wanted - capacity_);
  capacity_ = wanted;
  text_.reserve(wanted);
}

}  // namespace nanovllm::jinja
