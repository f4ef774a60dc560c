// The functions every template can call: range, dict, namespace, cycler, joiner, raise_exception,
// strftime_now.
#include <algorithm>

#include "io/jinja/runtime.h"
#include "io/utf8.h"

namespace nanovllm::jinja {

namespace {

constexpr size_t kMaxRange = 100'000;  // the limit of Jinja's sandbox

class Function final : public Object {
 public:
  using Code = Value (*)(Runtime&, const Arguments&);
  Function(std::string_view name, Code code) : name_(name), code_(code) {}

  std::string_view type_name() const override { return "function"; }
  std::string repr() const override { return fmt::format("<function {}>", name_); }
  bool is_callable() const override { return true; }
  Value call(Runtime& runtime, const Arguments& arguments) override {
    return code_(runtime, arguments);
  }

 private:
  std::string_view name_;
  Code code_;
};

/// The one kind of value that changes. Owned by the runtime, since it can come to hold itself.
class Namespace final : public Object {
 public:
  Namespace(Runtime& runtime, DictItems items)
      : attributes_(std::move(items)),
        held_(runtime.budget(), attributes_.size() * sizeof(DictItems::value_type)) {}

  std::string_view type_name() const override { return "Namespace"; }
  std::optional<Value> attribute(Runtime&, std::string_view name) override {
    for (const auto& [key, value] : attributes_) {
      if (key.is_string() && key.text() == name) return value;
    }
    return std::nullopt;
  }
  void set(Runtime& runtime, const std::string& name, const Value& value) {
    for (auto& [key, slot] : attributes_) {
      if (!key.is_string() || key.text() != name) continue;
      slot = value;
      return;
    }
    held_.grow(sizeof(DictItems::value_type));
    attributes_.emplace_back(runtime.string(name), value);
  }

 private:
  DictItems attributes_;
  Held held_;
};

class Cycler final : public Object {
 public:
  explicit Cycler(Value items) : items_(std::move(items)) {}
  std::string_view type_name() const override { return "Cycler"; }
  int depth() const override { return items_.depth() + 1; }
  std::optional<Value> attribute(Runtime&, std::string_view name) override {
    if (name == "current") return items_.sequence().items[position_];
    return std::nullopt;
  }
  MethodFunction method(std::string_view name) const override {
    if (name == "next") return next;
    if (name == "reset") return reset;
    return nullptr;
  }

 private:
  static Value next(Runtime&, const Value& self, const Arguments& arguments) {
    const Bound none("next", arguments, {});
    auto& cycler = static_cast<Cycler&>(self.object());
    const auto& items = cycler.items_.sequence().items;
    return items[std::exchange(cycler.position_, (cycler.position_ + 1) % items.size())];
  }
  static Value reset(Runtime&, const Value& self, const Arguments& arguments) {
    const Bound none("reset", arguments, {});
    static_cast<Cycler&>(self.object()).position_ = 0;
    return Value::none();
  }

  Value items_;
  size_t position_ = 0;
};

class Joiner final : public Object {
 public:
  explicit Joiner(Value separator) : separator_(std::move(separator)) {}
  std::string_view type_name() const override { return "Joiner"; }
  bool is_callable() const override { return true; }
  int depth() const override { return separator_.depth() + 1; }
  Value call(Runtime& runtime, const Arguments& arguments) override {
    const Bound none("joiner", arguments, {});
    return std::exchange(used_, true) ? separator_ : runtime.string("");
  }

 private:
  Value separator_;
  bool used_ = false;
};

Value range(Runtime& runtime, const Arguments& arguments) {
  const Bound bound("range", arguments, {"start", "stop", "step"}, 1);
  const bool only_stop = arguments.positional.size() == 1;
  for (size_t i = 0; i < arguments.positional.size(); ++i) {
    if (bound.at(i).is_none()) render_fail("'NoneType' object cannot be interpreted as an integer");
  }
  const Int start = only_stop ? Int{0} : bound.integer(0, 0);
  const Int stop = bound.integer(only_stop ? 0 : 1, 0);
  const Int step = bound.integer(2, 1);
  if (step == 0) render_fail("range() arg 3 must not be zero");
  constexpr Int kFar = Int{1} << 100;
  if (std::max({start, stop, step}) > kFar || std::min({start, stop, step}) < -kFar)
    render_fail("range() is too big");
  const Int distance = step > 0 ? stop - start : start - stop;
  const Int count = distance <= 0 ? Int{0} : (distance - 1) / (step > 0 ? step : -step) + 1;
  if (count > static_cast<Int>(kMaxRange))
    render_fail("range() gives more than {} numbers", kMaxRange);
  std::vector<Value> items;
  for (Int i = 0; i < count; ++i) items.push_back(Value::integer(start + i * step));
  return runtime.sequence(std::move(items), Sequence::Kind::range);
}

/// The items of dict(mapping or pairs, **named).
DictItems dict_items(Runtime& runtime, const Arguments& arguments) {
  if (arguments.positional.size() > 1) render_fail("dict expected at most 1 argument");
  DictItems items;
  if (!arguments.positional.empty() && arguments.positional[0].is_dict()) {
    items = arguments.positional[0].dict().items;
  } else if (!arguments.positional.empty()) {
    for (const Value& pair : runtime.iterate(arguments.positional[0])) {
      const Items both = runtime.iterate(pair);
      if (both.size() != 2) render_fail("dict() needs pairs, got {} values", both.size());
      items.emplace_back(both[0], both[1]);
    }
  }
  for (const auto& [name, value] : arguments.named) items.emplace_back(runtime.string(name), value);
  return items;
}

Value make_dict(Runtime& runtime, const Arguments& arguments) {
  return runtime.dict(dict_items(runtime, arguments));
}

Value make_namespace(Runtime& runtime, const Arguments& arguments) {
  const Value items = runtime.dict(dict_items(runtime, arguments));
  for (const auto& item : items.dict().items) {
    if (item.first.is_string() && item.first.text().starts_with('_')) {
      render_fail("a namespace attribute may not begin with an underscore: '{}'",
                  item.first.text());
    }
  }
  return runtime.keep(std::make_unique<Namespace>(runtime, items.dict().items));
}

Value make_cycler(Runtime& runtime, const Arguments& arguments) {
  if (arguments.positional.empty() || !arguments.named.empty())
    render_fail("cycler() takes one item or more");
  return runtime.object<Cycler>(runtime.sequence(arguments.positional));
}

Value make_joiner(Runtime& runtime, const Arguments& arguments) {
  const Bound bound("joiner", arguments, {"sep"});
  return runtime.object<Joiner>(bound[0] != nullptr ? *bound[0] : runtime.string(", "));
}

Value raise_exception(Runtime& runtime, const Arguments& arguments) {
  const Bound bound("raise_exception", arguments, {"message"}, 1);
  throw Error(ErrorKind::invalid_argument, one_line(to_str(runtime.budget(), bound.at(0))));
}

Value strftime_now(Runtime& runtime, const Arguments& arguments) {
  const Bound bound("strftime_now", arguments, {"format"}, 1);
  const std::string_view format = bound.text(0);
  constexpr size_t kMaxFormat = 1024;
  if (format.size() > kMaxFormat)
    render_fail("strftime_now: the format is longer than {} bytes", kMaxFormat);
  // strftime() returns 0 for an empty result and for one that does not fit: this one is not empty.
  const std::string terminated = std::string(format) + "|";
  const std::tm now = runtime.now();
  std::vector<char> buffer(16 * kMaxFormat);
  const size_t size = std::strftime(buffer.data(), buffer.size(), terminated.c_str(), &now);
  if (size == 0) render_fail("strftime_now: the result is too long");
  return runtime.string(std::string(buffer.data(), size - 1));
}

constexpr std::pair<std::string_view, Function::Code> kFunctions[] = {
    {"cycler", make_cycler},
    {"dict", make_dict},
    {"joiner", make_joiner},
    {"namespace", make_namespace},
    {"raise_exception", raise_exception},
    {"range", range},
    {"strftime_now", strftime_now}};

}  // namespace

Value find_global(Runtime& runtime, std::string_view name) {
  for (const auto& [known, code] : kFunctions) {
    if (known == name) return runtime.object<Function>(known, code);
  }
  return Value::undefined(fmt::format("'{}' is undefined", name));
}

bool set_namespace_attribute(Runtime& runtime, const Value& holder, const std::string& name,
                             const Value& value) {
  auto* target = holder.is_object() ? dynamic_cast<Namespace*>(&holder.object()) : nullptr;
  if (target == nullptr) return false;
  if (name.starts_with('_'))
    render_fail("a namespace attribute may not begin with an underscore: '{}'", name);
  target->set(runtime, name, value);
  return true;
}

}  // namespace nanovllm::jinja
