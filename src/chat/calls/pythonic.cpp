// Pythonic calls of Llama 3.2 and 4: [f(a=1, b='x'), g()], at the beginning of an answer, or
// between
// <|python_start|> and <|python_end|>. Anything else in brackets is text.
#include <utility>

#include "chat/calls/json_scanner.h"
#include "chat/calls/python_literal.h"

namespace nanovllm {
namespace {

constexpr std::string_view kEnd = "<|python_end|>";

/// Letters of any language, too, as in Python.
bool is_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
         c == '-' || c == '.' || static_cast<unsigned char>(c) >= 0x80;
}

class PythonicReader final : public CallReader {
 public:
  PythonicReader(bool has_end, std::span<const Tool> tools) : has_end_(has_end), tools_(tools) {}

  Step take(char c, CallSink& sink) override {
    if (is_space(c) && state_ != value && state_ != end_mark) return space();
    switch (state_) {
      case before:
        state_ = first_name;
        return c == '[' ? Step::more : Step::refused;
      case first_name:
      case name:
        return take_name(c);
      case first_key:
      case key:
        return take_key(c, sink);
      case value:
        return take_value(c, sink);
      case after_call:
        if (c == ',') {
          state_ = name;
          return Step::more;
        }
        if (c != ']') return Step::refused;
        state_ = end_mark;
        return has_end_ ? Step::more : Step::last;
      case end_mark:
        if (is_space(c) && text_.empty()) return Step::more;
        text_ += c;
        if (text_ == kEnd) return Step::last;
        return kEnd.starts_with(text_) ? Step::more : Step::refused;
    }
    return Step::refused;
  }
  // An end mark that max_tokens has cut is no text.
  bool finish(CallSink&) override { return state_ == end_mark; }

 private:
  /// White space may stand between the parts, not within a name.
  Step space() {
    name_ended_ = !text_.empty();
    return Step::more;
  }

  Step add_to_name(char c) {
    text_ += c;
    return name_ended_ || text_.size() > 512 ? Step::refused : Step::more;
  }

  std::string take_text() {
    name_ended_ = false;
    return std::exchange(text_, {});
  }

  Step take_name(char c) {
    if (is_name(c)) return add_to_name(c);
    if (c != '(' || !has_tool(tools_, text_)) return Step::refused;
    call_ = take_text();
    state_ = first_key;
    return Step::more;
  }

  Step take_key(char c, CallSink& sink) {
    if (is_name(c)) return add_to_name(c);
    if (c == ')' && text_.empty()) {
      if (state_ == first_key) begin(sink);
      return end_call(sink);
    }
    if (c != '=' || text_.empty()) return Step::refused;
    has_first_ = state_ == key;
    key_ = take_text();
    quote_ = '\0';
    depth_ = 0;
    is_escaped_ = false;
    state_ = value;
    return Step::more;
  }

  /// An argument is converted once it is complete.
  Step take_value(char c, CallSink& sink) {
    const bool ends = quote_ == '\0' && depth_ == 0 && (c == ',' || c == ')');
    if (!ends) {
      text_ += c;
      if (quote_ != '\0')
        take_in_string(c);
      else if (c == '\'' || c == '"')
        open_string(c);
      else if (c == '[' || c == '{' || c == '(')
        ++depth_;
      else if ((c == ']' || c == '}' || c == ')') && --depth_ < 0)
        return Step::refused;
      return Step::more;
    }
    const auto json = python_literal_as_json(text_);
    if (!json) return Step::refused;
    text_.clear();
    if (!has_first_) begin(sink);
    sink.add_arguments((has_first_ ? ", \"" : "{\"") + key_ + "\": " + *json);
    state_ = key;
    return c == ')' ? end_call(sink) : Step::more;
  }

  /// Three quotes are an empty string, until the third comes.
  void open_string(char quote) {
    quote_ = quote;
    num_quotes_ = text_.ends_with(std::string(3, quote)) ? 3 : 1;
    string_at_ = text_.size();
  }

  void take_in_string(char c) {
    if (std::exchange(is_escaped_, c == '\\' && !is_escaped_))
      string_at_ = text_.size();
    else if (text_.size() >= string_at_ + num_quotes_ &&
             text_.ends_with(std::string(num_quotes_, quote_)))
      quote_ = '\0';
  }

  void begin(CallSink& sink) {
    sink.begin_call(call_);
    if (state_ == first_key) sink.add_arguments("{");
  }
  Step end_call(CallSink& sink) {
    sink.add_arguments("}");
    sink.end_call();
    state_ = after_call;
    return Step::more;
  }

  const bool has_end_;
  std::span<const Tool> tools_;
  enum { before, first_name, name, first_key, key, value, after_call, end_mark } state_ = before;
  std::string text_, call_, key_;
  bool name_ended_ = false;  // with white space
  bool has_first_ = false;   // the call has an argument
  char quote_ = '\0';        // of the string within a value
  size_t num_quotes_ = 1;    // at either end of it
  size_t string_at_ = 0;     // where those that end it may begin
  int depth_ = 0;
  bool is_escaped_ = false;
};

}  // namespace

std::unique_ptr<CallReader> make_pythonic_reader(std::string_view mark,
                                                 std::span<const Tool> tools) {
  return std::make_unique<PythonicReader>(!mark.empty(), tools);
}

}  // namespace nanovllm
