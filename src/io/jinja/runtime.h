// The means of filters, tests, methods and functions: a factory of counted values, the clock, and
// bound arguments.
#pragma once

#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "io/jinja/render_settings.h"
#include "io/jinja/value.h"
#include "io/json.h"

namespace nanovllm::jinja {

/// Arguments of a call, evaluated.
struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;
};

/// An error of the running template, in fmt syntax.
template <class... Args>
[[noreturn]] void render_fail(fmt::format_string<Args...> format, Args&&... args) {
  throw RenderError(fmt::format(format, std::forward<Args>(args)...));
}

/// The items of something iterable. Keeps them alive, so it can stand in a range-for.
class Items {
 public:
  explicit Items(std::shared_ptr<const Sequence> sequence) : sequence_(std::move(sequence)) {}
  auto begin() const { return sequence_->items.begin(); }
  auto end() const { return sequence_->items.end(); }
  size_t size() const { return sequence_->items.size(); }
  bool empty() const { return sequence_->items.empty(); }
  const Value& operator[](size_t i) const { return sequence_->items[i]; }
  const Value& front() const { return sequence_->items.front(); }
  const Value& back() const { return sequence_->items.back(); }
  int depth() const { return sequence_->depth; }

 private:
  std::shared_ptr<const Sequence> sequence_;
};

class Runtime {
 public:
  Runtime(const ChatTemplateLimits& limits, const ChatClock& clock)
      : budget_(limits), clock_(clock) {}

  Budget& budget() { return budget_; }
  std::tm now() const { return clock_(); }

  Value string(std::string text, bool markup = false);
  Value sequence(std::vector<Value> items, Sequence::Kind kind = Sequence::Kind::list);
  /// An item of groupby: a tuple whose items also have the names `grouper` and `list`.
  Value group(const Value& grouper, const Value& list);
  /// Later pairs replace the value of earlier ones with an equal key.
  Value dict(DictItems items);
  /// Of items whose keys are known to be distinct.
  Value distinct_dict(DictItems items);
  Value from_json(const Json& json, int depth = 0);

  /// An object that dies with its last reference. It must not come to hold itself.
  template <class T, class... Args>
  Value object(Args&&... args) {
    return Value(
        std::static_pointer_cast<Object>(std::make_shared<T>(std::forward<Args>(args)...)));
  }
  /// An object that lives as long as the render, for those that can come to hold themselves
  /// (namespaces).
  Value keep(std::unique_ptr<Object> object);

  /// The items of what a `for` loop accepts; a generator is used up by it. Throws RenderError for
  /// anything else.
  Items iterate(const Value& value);
  /// len(); throws RenderError where the value has none.
  size_t length(const Value& value);

  /// Depth of a container of `values`; throws past kMaxValueDepth.
  static int depth_over(const std::vector<Value>& values);

 private:
  Budget budget_;
  const ChatClock& clock_;
  std::vector<std::unique_ptr<Object>> kept_;
};

/// Arguments bound to the names of a signature as Python binds them. Throws RenderError for too
/// many or unknown ones.
class Bound {
 public:
  Bound(std::string_view function, const Arguments& arguments,
        std::initializer_list<std::string_view> names, size_t required = 0);

  /// Null where the argument was not given.
  const Value* operator[](size_t i) const { return values_[i]; }
  /// The same, taking `none` for not given.
  const Value* get(size_t i) const {
    return values_[i] != nullptr && !values_[i]->is_none() ? values_[i] : nullptr;
  }
  const Value& at(size_t i) const { return *values_[i]; }  ///< for required ones
  Int integer(size_t i, Int fallback) const;
  bool truth(size_t i, bool fallback) const {
    return values_[i] != nullptr ? values_[i]->truth() : fallback;
  }
  /// Throws RenderError where it is not a string.
  std::string_view text(size_t i, std::string_view fallback = "") const;

 private:
  std::string_view function_;
  std::vector<const Value*> values_;
};

using FilterFunction = Value (*)(Runtime&, const Value& input, const Arguments&);
using TestFunction = bool (*)(Runtime&, const Value& input, const Arguments&);

/// Null where there is none of that name.
FilterFunction find_filter(std::string_view name);
TestFunction find_test(std::string_view name);
MethodFunction find_string_method(std::string_view name);
/// Of lists, tuples and dicts. A name that would change the value is refused when it is called.
MethodFunction find_collection_method(const Value& self, std::string_view name);
/// Is this what stands for the methods that would change a value?
bool is_refused(MethodFunction method);

/// Global functions (`range`, `namespace`, ...), as a value; undefined where there is none of that
/// name.
Value find_global(Runtime& runtime, std::string_view name);

/// namespace.name = value; false where `holder` is no namespace.
bool set_namespace_attribute(Runtime& runtime, const Value& holder, const std::string& name,
                             const Value& value);

/// `value.name` and `value[key]` of the template language, with Jinja's precedence; undefined where
/// there is neither.
Value get_attribute(Runtime& runtime, const Value& value, const std::string& name);
Value get_item(Runtime& runtime, const Value& value, const Value& key);
/// value[start:stop:step]; null bounds are open.
Value get_slice(Runtime& runtime, const Value& value, const Value* start, const Value* stop,
                const Value* step);
/// The method `name` of `value` where it has one that is found before any item, else null.
MethodFunction find_method(const Value& value, std::string_view name);

enum class BinaryOp { add, subtract, multiply, divide, floor_divide, modulo, power };
Value binary(Runtime& runtime, BinaryOp op, const Value& a, const Value& b);
Value negate(const Value& value);
bool contains(Runtime& runtime, const Value& container, const Value& item);
Value call_value(Runtime& runtime, const Value& callee, const Arguments& arguments);

/// `pattern % arguments` and `pattern.format(arguments)`.
std::string percent_format(Runtime& runtime, std::string_view pattern, const Value& arguments);
std::string brace_format(Runtime& runtime, std::string_view pattern, const Arguments& arguments);

/// str.replace; all occurrences where `count` is negative.
std::string replace_text(Runtime& runtime, std::string_view text, std::string_view old,
                         std::string_view replacement, Int count);
/// `text` filled up to `width` code points; side: -1 text left, 0 centred, 1 text right.
std::string pad_text(Runtime& runtime, std::string_view text, Int width, std::string_view fill,
                     int side);
/// Some code point passes `has` and none `has_not` (islower, isupper).
bool has_case(Runtime& runtime, std::string_view text, bool (*has)(char32_t),
              bool (*has_not)(char32_t));
/// HTML-escaped text.
std::string escape_html(std::string_view text);
/// Python's int(value, base) and float(value) for strings; nothing where it would raise ValueError.
std::optional<Int> parse_int(std::string_view text, int base = 10);
std::optional<double> parse_float(std::string_view text);
/// An integer of a float, as int() does; throws RenderError outside 128 bits.
Int truncate_to_int(double value);
/// Checks that an integer is a usable size or position and narrows it (to the nearest representable
/// one).
int64_t clamp_index(Int value);

}  // namespace nanovllm::jinja
