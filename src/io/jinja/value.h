// Values of a running template: Python's data model as far as templates can see it.
//
// Values are immutable (transformers renders in Jinja's immutable sandbox), so containers form no
// cycles and may be shared. Each container knows how deep it nests and none nests deeper than
// kMaxValueDepth: what walks a value recursively, its destructor included, is bounded by that.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "io/jinja/budget.h"

namespace nanovllm::jinja {

/// Python's integers go on for ever; ours end at 128 bits and overflow is an error.
using Int = __int128;

inline constexpr int kMaxValueDepth = 200;

struct String;
struct Sequence;
struct Dict;
class Object;

class Value {
 public:
  /// Undefined; `why` is the message of the error when it is used.
  static Value undefined(std::string_view why);
  static Value none() { return Value(None{}); }
  static Value boolean(bool b) { return Value(b); }
  static Value integer(Int i) { return Value(i); }
  static Value real(double d) { return Value(d); }
  /// A string that no budget counts, for literals of the template.
  static Value literal(std::string text);

  Value() : data_(Undefined{}) {}
  explicit Value(std::shared_ptr<const String> s) : data_(std::move(s)) {}
  explicit Value(std::shared_ptr<const Sequence> s) : data_(std::move(s)) {}
  explicit Value(std::shared_ptr<const Dict> d) : data_(std::move(d)) {}
  explicit Value(std::shared_ptr<Object> o) : data_(std::move(o)) {}

  bool is_undefined() const { return std::holds_alternative<Undefined>(data_); }
  bool is_none() const { return std::holds_alternative<None>(data_); }
  bool is_boolean() const { return std::holds_alternative<bool>(data_); }
  bool is_integer() const { return std::holds_alternative<Int>(data_); }
  bool is_real() const { return std::holds_alternative<double>(data_); }
  bool is_number() const { return is_boolean() || is_integer() || is_real(); }
  bool is_string() const { return std::holds_alternative<std::shared_ptr<const String>>(data_); }
  bool is_sequence() const {
    return std::holds_alternative<std::shared_ptr<const Sequence>>(data_);
  }
  bool is_dict() const { return std::holds_alternative<std::shared_ptr<const Dict>>(data_); }
  bool is_object() const { return std::holds_alternative<std::shared_ptr<Object>>(data_); }

  /// The payloads; the value must be of that kind (as_integer takes a boolean too, as Python does).
  std::string why_undefined() const;
  bool as_boolean() const { return std::get<bool>(data_); }
  Int as_integer() const { return is_boolean() ? Int{as_boolean()} : std::get<Int>(data_); }
  double as_real() const {
    return is_real() ? std::get<double>(data_) : static_cast<double>(as_integer());
  }
  const std::string& text() const;
  bool is_markup() const;  ///< a string marked `safe`
  const Sequence& sequence() const { return *std::get<std::shared_ptr<const Sequence>>(data_); }
  const std::shared_ptr<const Sequence>& sequence_ptr() const {
    return std::get<std::shared_ptr<const Sequence>>(data_);
  }
  const Dict& dict() const { return *std::get<std::shared_ptr<const Dict>>(data_); }
  Object& object() const { return *std::get<std::shared_ptr<Object>>(data_); }

  bool truth() const;
  int depth() const;
  /// The name of the type in Python ("str", "NoneType", "dict").
  std::string_view type_name() const;

 private:
  struct None {};
  struct Undefined {
    std::shared_ptr<const std::string> why = nullptr;
  };
  using Data = std::variant<None, Undefined, bool, Int, double, std::shared_ptr<const String>,
                            std::shared_ptr<const Sequence>, std::shared_ptr<const Dict>,
                            std::shared_ptr<Object>>;
  explicit Value(Data data) : data_(std::move(data)) {}
  template <class T>
  requires(std::is_same_v<T, None> || std::is_same_v<T, Undefined> || std::is_same_v<T, bool> ||
           std::is_same_v<T, Int> || std::is_same_v<T, double>) explicit Value(T payload)
      : data_(std::move(payload)) {}

  Data data_;
};

struct String {
  std::string text;  ///< UTF-8
  bool markup = false;
  Held held;
};

/// Lists and all that iterates like one.
struct Sequence {
  enum class Kind { list, tuple, range, generator, keys, values, items };
  Kind kind = Kind::list;
  std::vector<Value> items;
  int depth = 1;
  Held held;
  bool is_group = false;  ///< of groupby
  /// Generators only: how many items have been taken. What has been iterated over once is gone, as
  /// in Python.
  mutable size_t taken = 0;

  bool is_view() const { return kind == Kind::keys || kind == Kind::values || kind == Kind::items; }
  bool is_indexable() const {
    return kind == Kind::list || kind == Kind::tuple || kind == Kind::range;
  }
};

using DictItems = std::vector<std::pair<Value, Value>>;

struct Dict {
  DictItems items;  ///< in order of insertion, keys distinct
  int depth = 1;
  Held held;

  const Value* find(std::string_view key) const;
};

class Runtime;
struct Arguments;
using MethodFunction = Value (*)(Runtime&, const Value& self, const Arguments&);

/// A value with an identity, which lives for one render: namespace, loop, macro, method, function.
class Object {
 public:
  virtual ~Object() = default;
  virtual std::string_view type_name() const = 0;
  virtual std::string repr() const;
  virtual std::optional<Value> attribute(Runtime&, std::string_view) { return std::nullopt; }
  /// Null where it has no method of that name.
  virtual MethodFunction method(std::string_view) const { return nullptr; }
  virtual bool is_callable() const { return false; }
  virtual Value call(Runtime& runtime, const Arguments& arguments);
  /// How deep the values nest that this keeps alive.
  virtual int depth() const { return 0; }
  /// len(), where Python has one.
  virtual std::optional<size_t> length(Runtime&) { return std::nullopt; }
};

/// Python's ==.
bool equal(Budget& budget, const Value& a, const Value& b);
/// Python's <, for numbers, strings and sequences; throws RenderError for other pairs.
bool less(Budget& budget, const Value& a, const Value& b, std::string_view op = "<");
/// Throws RenderError where Python could not hash `key`.
void expect_hashable(const Value& key);
const Value* find(Budget& budget, const Dict& dict, const Value& key);

/// str(), repr() and json.dumps().
std::string to_str(Budget& budget, const Value& value);
std::string to_repr(Budget& budget, const Value& value);
std::string int_text(Int value);

struct JsonStyle {
  bool ensure_ascii = false;
  bool sort_keys = false;
  std::optional<std::string> indent;  ///< what one level is indented by; one line where absent
  std::string item_separator = ", ";
  std::string key_separator = ": ";
};
std::string to_json(Budget& budget, const Value& value, const JsonStyle& style);

}  // namespace nanovllm::jinja
