// Qwen3-Coder and Qwen3.5: <tool_call><function=f><parameter=a>value</parameter></function>
// </tool_call>, each on a line of its own; Seed-OSS the same with <seed:tool_call> and values
// without lines. Values are bare: the tool's schema says which are strings.
#include <algorithm>
#include <set>

#include <nlohmann/json.hpp>

#include "chat/calls/json_scanner.h"
#include "chat/calls/python_literal.h"
#include "chat/schema_types.h"

namespace nanovllm {
namespace {

using namespace std::string_view_literals;

constexpr auto kValueEnd = "</parameter>"sv;

bool is_type(const Json& value, const std::set<std::string>& types) {
  const auto has = [&](const char* type) { return types.empty() || types.contains(type); };
  switch (value.type()) {
    case Json::value_t::null:
      return has("null");
    case Json::value_t::boolean:
      return has("boolean");
    case Json::value_t::number_integer:
    case Json::value_t::number_unsigned:
      return has("integer") || has("number");
    case Json::value_t::number_float:
      return has("number");
    case Json::value_t::object:
      return has("object");
    case Json::value_t::array:
      return has("array");
    default:
      return false;  // a string is written bare
  }
}

/// The JSON of a bare value: of one of the types if it can be, else a string.
std::string as_json(const std::string& text, const std::set<std::string>& types) {
  if (const auto json = python_literal_as_json(text))
    if (is_type(Json::parse(*json, nullptr, false), types)) return *json;
  return '"' + json_escaped(text) + '"';
}

class QwenCoderReader final : public CallReader {
 public:
  QwenCoderReader(std::string_view mark, std::span<const Tool> tools)
      : end_(mark == "<seed:tool_call>" ? "</seed:tool_call>"sv : "</tool_call>"sv),
        has_lines_(mark != "<seed:tool_call>"),
        state_(mark == "<function=" ? name : before),
        tools_(tools) {}

  Step take(char c, CallSink& sink) override {
    switch (state_) {
      case before:
        return expect(c, {"<function="sv}, {name});
      case name:
        return take_name(c, sink);
      case between: {
        const Step step = expect(c, {"<parameter="sv, "</function>"sv}, {key, after});
        if (state_ != after || step != Step::more) return step;
        sink.add_arguments(keys_.empty() ? "{}" : "}");
        sink.end_call();
        return step;
      }
      case key:
        return take_key(c);
      case value:
        return take_value(c, sink);
      case after: {
        const Step step = expect(c, {end_}, {done});
        return state_ == done ? Step::last : step;
      }
      default:
        return Step::refused;
    }
  }
  // An end mark that max_tokens has cut is no text.
  bool finish(CallSink&) override { return state_ == after; }

 private:
  enum State { before, name, between, key, value, after, done };

  /// One of the texts, after white space; each leads to the state of the same place.
  Step expect(char c, std::initializer_list<std::string_view> texts,
              std::initializer_list<State> states) {
    if (is_space(c)) return text_.empty() ? Step::more : Step::refused;
    text_ += c;
    bool has_begun = false;
    const State* state = states.begin();
    for (const std::string_view text : texts) {
      if (text == text_) {
        text_.clear();
        state_ = *state;
        return Step::more;
      }
      has_begun = has_begun || text.starts_with(text_);
      ++state;
    }
    return has_begun ? Step::more : Step::refused;
  }

  Step take_name(char c, CallSink& sink) {
    if (c != '>') {
      text_ += c;
      return text_.size() > 512 || c == '<' || c == '\n' ? Step::refused : Step::more;
    }
    if (text_.empty()) return Step::refused;
    const auto tool = std::ranges::find(tools_, text_, &Tool::name);
    schema_ = tool == tools_.end() ? Json() : parameters_of(*tool, Json());
    sink.begin_call(std::exchange(text_, {}));
    state_ = between;
    return Step::more;
  }

  Step take_key(char c) {
    if (c != '>') {
      text_ += c;
      return text_.size() > 512 || c == '\n' ? Step::refused : Step::more;
    }
    if (!keys_.insert(text_).second) return Step::refused;
    key_ = std::exchange(text_, {});
    types_ = {"string"};  // of a parameter that the schema does not know
    if (schema_.is_object() && schema_.contains("properties")) {
      const Json& properties = schema_["properties"];
      if (properties.is_object() && properties.contains(key_))
        types_ = types_of_schema(properties[key_], schema_);
    }
    is_string_ = types_.size() == 1 && types_.contains("string");
    has_begun_ = false;
    at_first_ = true;
    state_ = value;
    return Step::more;
  }

  /// A string is given as it comes, anything else once it is complete.
  Step take_value(char c, CallSink& sink) {
    if (std::exchange(at_first_, false) && has_lines_ && c == '\n') return Step::more;
    text_ += c;
    const bool ends = text_.ends_with(kValueEnd);
    if (ends) {
      text_.resize(text_.size() - kValueEnd.size());
      if (has_lines_ && text_.ends_with('\n')) text_.pop_back();
    }
    if (is_string_) {
      const size_t held = ends ? 0 : held_back();
      const std::string piece =
          json_escaped(std::string_view(text_).substr(0, text_.size() - held));
      text_.erase(0, text_.size() - held);
      if (!std::exchange(has_begun_, true)) sink.add_arguments(opening() + '"');
      if (!piece.empty()) sink.add_arguments(piece);
      if (ends) sink.add_arguments("\"");
    } else if (ends) {
      sink.add_arguments(opening() + as_json(text_, types_));
    }
    if (ends) {
      text_.clear();
      state_ = between;
    }
    return Step::more;
  }

  std::string opening() const {
    return (keys_.size() == 1 ? "{\"" : ", \"") + json_escaped(key_) + "\": ";
  }

  /// Length of the text's end that may be the beginning of the value's end.
  size_t held_back() const {
    constexpr std::string_view kEndLine = "\n</parameter>";
    for (size_t n = std::min(kEndLine.size() - 1, text_.size()); n > 0; --n) {
      const std::string_view tail = std::string_view(text_).substr(text_.size() - n);
      if ((has_lines_ && kEndLine.starts_with(tail)) || kValueEnd.starts_with(tail)) return n;
    }
    return 0;
  }

  const std::string_view end_;
  const bool has_lines_;
  State state_;
  std::span<const Tool> tools_;
  Json schema_;
  std::string text_, key_;
  std::set<std::string> keys_, types_;
  bool is_string_ = false, has_begun_ = false, at_first_ = false;
};

}  // namespace

std::unique_ptr<CallReader> make_qwen3_coder_reader(std::string_view mark,
                                                    std::span<const Tool> tools) {
  return std::make_unique<QwenCoderReader>(mark, tools);
}

}  // namespace nanovllm
