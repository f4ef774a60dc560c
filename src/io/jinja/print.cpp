// str(), repr() and json.dumps() of values.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "io/jinja/text.h"
#include "io/jinja/value.h"

namespace nanovllm::jinja {

std::string int_text(Int value) { return fmt::format("{}", value); }

namespace {

void append_repr(Budget& budget, TextBuilder& out, const Value& value);

void append_items(Budget& budget, TextBuilder& out, const std::vector<Value>& items) {
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) out.append(", ");
    append_repr(budget, out, items[i]);
  }
}

void append_sequence(Budget& budget, TextBuilder& out, const Value& value) {
  const Sequence& sequence = value.sequence();
  switch (sequence.kind) {
    case Sequence::Kind::list:
      out.append("[");
      append_items(budget, out, sequence.items);
      out.append("]");
      return;
    case Sequence::Kind::tuple:
      out.append("(");
      append_items(budget, out, sequence.items);
      out.append(sequence.items.size() == 1 ? ",)" : ")");
      return;
    case Sequence::Kind::range: {
      const auto& items = sequence.items;
      const Int start = items.empty() ? Int{0} : items.front().as_integer();
      const Int step = items.size() < 2 ? Int{1} : items[1].as_integer() - start;
      const Int stop = items.empty() ? Int{0} : items.back().as_integer() + (step > 0 ? 1 : -1);
      out.append(step == 1 ? fmt::format("range({}, {})", start, stop)
                           : fmt::format("range({}, {}, {})", start, stop, step));
      return;
    }
    case Sequence::Kind::generator:
      out.append("<generator>");
      return;
    case Sequence::Kind::keys:
    case Sequence::Kind::values:
    case Sequence::Kind::items:
      out.append(value.type_name());
      out.append("([");
      append_items(budget, out, sequence.items);
      out.append("])");
      return;
  }
}

void append_repr(Budget& budget, TextBuilder& out, const Value& value) {
  budget.spend();
  if (value.is_undefined()) return out.append("Undefined");
  if (value.is_none()) return out.append("None");
  if (value.is_boolean()) return out.append(value.as_boolean() ? "True" : "False");
  if (value.is_integer()) return out.append(int_text(value.as_integer()));
  if (value.is_real()) return out.append(float_repr(value.as_real()));
  if (value.is_string()) {
    budget.spend_bytes(value.text().size());
    budget.expect_room(4 * value.text().size());
    const std::string quoted = string_repr(value.text());
    return out.append(value.is_markup() ? fmt::format("Markup({})", quoted) : quoted);
  }
  if (value.is_sequence()) return append_sequence(budget, out, value);
  if (value.is_object()) return out.append(value.object().repr());
  out.append("{");
  bool first = true;
  for (const auto& [key, item] : value.dict().items) {
    if (!first) out.append(", ");
    first = false;
    append_repr(budget, out, key);
    out.append(": ");
    append_repr(budget, out, item);
  }
  out.append("}");
}

/// json.dumps, one level of nesting at a time.
class JsonWriter {
 public:
  JsonWriter(Budget& budget, const JsonStyle& style)
      : budget_(budget), style_(style), out_(budget) {}

  void write(const Value& value) {
    budget_.spend();
    if (value.is_none()) return out_.append("null");
    if (value.is_boolean()) return out_.append(value.as_boolean() ? "true" : "false");
    if (value.is_integer()) return out_.append(int_text(value.as_integer()));
    if (value.is_real()) return out_.append(real_text(value.as_real()));
    if (value.is_string()) return write_string(value.text());
    if (value.is_dict()) return write_dict(value.dict());
    if (value.is_sequence() && value.sequence().is_indexable() &&
        value.sequence().kind != Sequence::Kind::range) {
      return write_list(value.sequence().items);
    }
    throw RenderError(fmt::format("Object of type {} is not JSON serializable", value.type_name()));
  }
  std::string take() { return out_.take(); }

 private:
  static std::string real_text(double d) {
    if (std::isnan(d)) return "NaN";
    if (std::isinf(d)) return d > 0 ? "Infinity" : "-Infinity";
    return float_repr(d);
  }

  static std::string key_text(const Value& key) {
    if (key.is_string()) return key.text();
    if (key.is_none()) return "null";
    if (key.is_boolean()) return key.as_boolean() ? "true" : "false";
    if (key.is_integer()) return int_text(key.as_integer());
    if (key.is_real()) return real_text(key.as_real());
    throw RenderError(
        fmt::format("keys must be str, int, float, bool or None, not {}", key.type_name()));
  }

  void write_string(std::string_view text) {
    budget_.spend_bytes(text.size());
    budget_.expect_room(6 * text.size());
    out_.append(json_quote(text, style_.ensure_ascii));
  }

  void new_line() {
    out_.append("\n");
    for (int i = 0; i < level_; ++i) out_.append(*style_.indent);
  }

  void begin(std::string_view bracket) {
    out_.append(bracket);
    ++level_;
    if (style_.indent) new_line();
  }
  void separate() {
    out_.append(style_.item_separator);
    if (style_.indent) new_line();
  }
  void end(std::string_view bracket) {
    --level_;
    if (style_.indent) new_line();
    out_.append(bracket);
  }

  void write_list(const std::vector<Value>& items) {
    if (items.empty()) return out_.append("[]");
    begin("[");
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) separate();
      write(items[i]);
    }
    end("]");
  }

  void write_dict(const Dict& dict) {
    if (dict.items.empty()) return out_.append("{}");
    std::vector<const std::pair<Value, Value>*> order;
    for (const auto& item : dict.items) order.push_back(&item);
    if (style_.sort_keys) {
      std::stable_sort(order.begin(), order.end(), [this](const auto* a, const auto* b) {
        return less(budget_, a->first, b->first);
      });
    }
    begin("{");
    for (size_t i = 0; i < order.size(); ++i) {
      if (i > 0) separate();
      write_string(key_text(order[i]->first));
      out_.append(style_.key_separator);
      write(order[i]->second);
    }
    end("}");
  }

  Budget& budget_;
  const JsonStyle& style_;
  TextBuilder out_;
  int level_ = 0;
};

}  // namespace

std::string to_repr(Budget& budget, const Value& value) {
  TextBuilder out(budget);
  append_repr(budget, out, value);
  return out.take();
}

std::string to_str(Budget& budget, const Value& value) {
  if (value.is_string()) return value.text();
  if (value.is_undefined()) return "";
  return to_repr(budget, value);
}

std::string to_json(Budget& budget, const Value& value, const JsonStyle& style) {
  JsonWriter writer(budget, style);
  writer.write(value);
  return writer.take();
}

}  // namespace nanovllm::jinja
