#include "io/jinja/loop.h"

namespace nanovllm::jinja {

std::optional<Value> LoopState::draw() {
  while (evaluator_ != nullptr && drawn_ < items_.size()) {
    const Value& item = items_[drawn_++];
    if (loop_.condition == nullptr || evaluator_->passes(loop_, scope_, item)) return item;
  }
  return std::nullopt;
}

const Value* LoopState::peek() {
  if (ahead_.empty()) {
    auto item = draw();
    if (!item) return nullptr;
    ahead_.push_back(std::move(*item));
  }
  return &ahead_.front();
}

bool LoopState::advance() {
  if (peek() == nullptr) return false;
  if (count_ > 0) previous_ = std::move(current_);
  current_ = std::move(ahead_.front());
  ahead_.pop_front();
  ++count_;
  return true;
}

std::optional<size_t> LoopState::length(Runtime&) {
  if (loop_.condition == nullptr) return items_.size();
  while (auto item = draw()) ahead_.push_back(std::move(*item));
  return count_ + ahead_.size();
}

std::optional<Value> LoopState::attribute(Runtime& runtime, std::string_view name) {
  const auto integer = [](size_t i) { return Value::integer(static_cast<Int>(i)); };
  if (name == "index") return integer(count_);
  if (name == "index0") return integer(count_ - 1);
  if (name == "first") return Value::boolean(count_ == 1);
  if (name == "last") return Value::boolean(peek() == nullptr);
  if (name == "length") return integer(*length(runtime));
  if (name == "revindex") return integer(*length(runtime) - count_ + 1);
  if (name == "revindex0") return integer(*length(runtime) - count_);
  if (name == "depth") return Value::integer(depth0_ + 1);
  if (name == "depth0") return Value::integer(depth0_);
  if (name == "previtem")
    return count_ > 1 ? previous_ : Value::undefined("there is no previous item");
  if (name == "nextitem") {
    const Value* next = peek();
    return next != nullptr ? *next : Value::undefined("there is no next item");
  }
  return std::nullopt;
}

MethodFunction LoopState::method(std::string_view name) const {
  if (name == "cycle") return cycle;
  if (name == "changed") return changed;
  return nullptr;
}

Value LoopState::cycle(Runtime&, const Value& self, const Arguments& arguments) {
  const auto& values = arguments.positional;
  if (values.empty()) render_fail("loop.cycle() needs values to cycle through");
  return values[(static_cast<LoopState&>(self.object()).count_ - 1) % values.size()];
}

Value LoopState::changed(Runtime& runtime, const Value& self, const Arguments& arguments) {
  auto& loop = static_cast<LoopState&>(self.object());
  Value now = runtime.sequence(arguments.positional, Sequence::Kind::tuple);
  if (loop.last_changed_ && equal(runtime.budget(), *loop.last_changed_, now))
    return Value::boolean(false);
  // A loop must not come to hold itself: what could lead back to it is compared, but not kept.
  if (now.depth() > 1) return Value::boolean(true);
  loop.last_changed_ = std::move(now);
  return Value::boolean(true);
}

Value LoopState::call(Runtime&, const Arguments& arguments) {
  if (!loop_.recursive) render_fail("only a loop marked 'recursive' can be called");
  if (evaluator_ == nullptr) render_fail("the loop has ended");
  const Bound bound("loop", arguments, {"iterable"}, 1);
  return evaluator_->recurse(loop_, scope_, bound.at(0), depth0_ + 1);
}

}  // namespace nanovllm::jinja
