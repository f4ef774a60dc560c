// The `loop` variable of a `for` block: the position, the neighbours, and the iteration itself.
#pragma once

#include <deque>
#include <optional>
#include <string_view>

#include "io/jinja/evaluator.h"

namespace nanovllm::jinja {

/// Items are drawn one at a time, as Jinja does: the loop's `if` may read what the body has set in
/// a namespace.
class LoopState final : public Object {
 public:
  LoopState(Evaluator& evaluator, const For& loop, Scope* scope, Items items, int depth0)
      : evaluator_(&evaluator),
        loop_(loop),
        scope_(scope),
        items_(std::move(items)),
        depth0_(depth0) {}

  /// Steps to the next item; false after the last.
  bool advance();
  const Value& current() const { return current_; }
  /// The loop has ended: what still refers to this draws no more items.
  void finish() { evaluator_ = nullptr; }

  std::string_view type_name() const override { return "LoopContext"; }
  std::optional<Value> attribute(Runtime& runtime, std::string_view name) override;
  MethodFunction method(std::string_view name) const override;
  bool is_callable() const override { return true; }
  Value call(Runtime& runtime, const Arguments& arguments) override;
  int depth() const override { return items_.depth() + 1; }
  std::optional<size_t> length(Runtime& runtime) override;

 private:
  std::optional<Value> draw();
  const Value* peek();
  static Value cycle(Runtime& runtime, const Value& self, const Arguments& arguments);
  static Value changed(Runtime& runtime, const Value& self, const Arguments& arguments);

  Evaluator* evaluator_;
  const For& loop_;
  Scope* scope_;
  Items items_;
  size_t drawn_ = 0;         // items looked at, whether or not they passed the `if`
  std::deque<Value> ahead_;  // items drawn before their turn
  size_t count_ = 0;         // items passed to the body
  Value previous_, current_;
  std::optional<Value> last_changed_;
  int depth0_;
};

}  // namespace nanovllm::jinja
