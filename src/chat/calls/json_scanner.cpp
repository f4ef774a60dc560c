#include "chat/calls/json_scanner.h"

#include <nlohmann/json.hpp>

namespace nanovllm {
namespace {

using Step = CallReader::Step;

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_hexadecimal(char c) {
  return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}

/// The text of a JSON string; one with half a surrogate pair gives none.
std::string unquoted(const std::string& json) {
  const Json text = Json::parse(json, nullptr, /*allow_exceptions=*/false);
  return text.is_string() ? text.get<std::string>() : std::string();
}

}  // namespace

Step JsonScanner::take(char c) {
  if (state_ == string) return take_string(c);
  if (state_ == literal) return take_literal(c);
  if (state_ == number) {
    const Step step = take_number(c);
    if (step != Step::past || open_.empty()) return step;
    state_ = after;
  }
  if (is_space(c)) return Step::more;
  switch (state_) {
    case first_key:
    case key:
      if (c == '}' && state_ == first_key) return end_value();
      if (c != '"') return Step::refused;
      is_key_ = true;
      state_ = string;
      return Step::more;
    case colon:
      if (c != ':') return Step::refused;
      state_ = value;
      return Step::more;
    case after:
      if (c == (open_.back() == '{' ? '}' : ']')) return end_value();
      if (c != ',') return Step::refused;
      state_ = open_.back() == '{' ? key : value;
      return Step::more;
    case first_value:
      if (c == ']') return end_value();
      return begin_value(c);
    default:
      return begin_value(c);
  }
}

Step JsonScanner::begin_value(char c) {
  constexpr size_t kMaxDepth = 64;
  if (c == '{' || c == '[') {
    if (open_.size() == kMaxDepth) return Step::refused;
    open_ += c;
    state_ = c == '{' ? first_key : first_value;
  } else if (c == '"') {
    is_key_ = false;
    state_ = string;
  } else if (is_digit(c) || c == '-') {
    number_ = c == '-' || c == '0' ? c : '1';
    state_ = number;
  } else if (c == 't' || c == 'f' || c == 'n') {
    literal_ = c == 't' ? "rue" : c == 'f' ? "alse" : "ull";
    state_ = literal;
  } else {
    return Step::refused;
  }
  return Step::more;
}

Step JsonScanner::take_string(char c) {
  if (static_cast<unsigned char>(c) < 0x20) return Step::refused;
  if (needs_low_ && ((escape_ == 0 && c != '\\') || (escape_ == 1 && c != 'u')))
    return Step::refused;
  if (escape_ == 1) {
    unit_ = 0;
    if (c == 'u')
      escape_ = 5;
    else if (std::string_view("\"\\/bfnrt").find(c) == std::string_view::npos)
      return Step::refused;
    else
      escape_ = 0;
  } else if (escape_ > 1) {
    if (!is_hexadecimal(c)) return Step::refused;
    unit_ = unit_ * 16 + static_cast<unsigned>(is_digit(c) ? c - '0' : (c | 0x20) - 'a' + 10);
    if (--escape_ > 1) return Step::more;
    escape_ = 0;
    if (needs_low_ != (unit_ >= 0xDC00 && unit_ < 0xE000)) return Step::refused;
    needs_low_ = unit_ >= 0xD800 && unit_ < 0xDC00;
  } else if (c == '\\') {
    escape_ = 1;
  } else if (c == '"') {
    if (!is_key_) {
      state_ = after;
      return open_.empty() ? Step::last : Step::more;
    }
    state_ = colon;
  }
  return Step::more;
}

// The number's part so far: '-' a sign alone, '0' a leading zero, '1' digits, '.' a point, 'f'
// digits behind it, 'e' the exponent's letter, '+' its sign, 'x' its digits.
Step JsonScanner::take_number(char c) {
  const char was = number_;
  char now = 0;
  if (is_digit(c)) {
    if (was == '-')
      now = c == '0' ? '0' : '1';
    else if (was == '1')
      now = '1';
    else if (was == '.' || was == 'f')
      now = 'f';
    else if (was == 'e' || was == '+' || was == 'x')
      now = 'x';
  } else if (c == '.' && (was == '0' || was == '1')) {
    now = '.';
  } else if ((c == 'e' || c == 'E') && (was == '0' || was == '1' || was == 'f')) {
    now = 'e';
  } else if ((c == '+' || c == '-') && was == 'e') {
    now = '+';
  } else if (was == '0' || was == '1' || was == 'f' || was == 'x') {
    return Step::past;
  }
  number_ = now;
  return now ? Step::more : Step::refused;
}

Step JsonScanner::take_literal(char c) {
  if (c != literal_.front()) return Step::refused;
  literal_.remove_prefix(1);
  if (!literal_.empty()) return Step::more;
  state_ = after;
  return open_.empty() ? Step::last : Step::more;
}

Step JsonScanner::end_value() {
  open_.pop_back();
  state_ = after;
  return open_.empty() ? Step::last : Step::more;
}

// -- JsonCall

Step JsonCall::take(char c, CallSink& sink) {
  if (state_ == in_value) return take_value(c, sink);
  if (state_ == in_key) {
    text_ += c;
    const Step step = scanner_.take(c);
    if (step == Step::last) state_ = colon;
    return step == Step::last ? Step::more : step;
  }
  if (is_space(c)) return state_ == start ? Step::refused : Step::more;
  switch (state_) {
    case start:
      state_ = first_key;
      return c == '{' ? Step::more : Step::refused;
    case colon:
      state_ = before_value;
      return c == ':' ? Step::more : Step::refused;
    case before_value: {
      const std::string found = unquoted(text_);
      member_ = found == "name"                                 ? name
                : found == "arguments" || found == "parameters" ? arguments
                                                                : other;
      if (member_ == arguments && (c != '{' || has_arguments_)) return Step::refused;
      if (member_ == name && (c != '"' || !name_.empty())) return Step::refused;
      // An answer in JSON is not to wait for its end.
      if (!tools_.empty() && name_.empty() && member_ == other && found != "type" && found != "id")
        return Step::refused;
      text_.clear();
      scanner_ = {};
      state_ = in_value;
      return take_value(c, sink);
    }
    case after_value:
      if (c == '}') return end_object(sink);
      state_ = key;
      return c == ',' ? Step::more : Step::refused;
    default:  // a key
      if (c != '"') return Step::refused;
      scanner_ = {};
      scanner_.take(c);
      text_ = c;
      state_ = in_key;
      return Step::more;
  }
}

Step JsonCall::take_value(char c, CallSink& sink) {
  const Step step = scanner_.take(c);
  if (step == Step::refused) return step;
  if (step == Step::past) {
    end_member(sink);
    return take(c, sink);
  }
  if (member_ == name) {
    text_ += c;
  } else if (member_ == arguments) {
    if (!name_.empty() && !has_begun_) {
      sink.begin_call(name_);
      has_begun_ = true;
    }
    if (has_begun_)
      sink.add_arguments(std::string_view(&c, 1));
    else
      arguments_ += c;
  }
  return step == Step::last ? end_member(sink) : Step::more;
}

Step JsonCall::end_member(CallSink& sink) {
  state_ = after_value;
  if (member_ == arguments) has_arguments_ = true;
  if (member_ != name) return Step::more;
  name_ = unquoted(text_);
  if (name_.empty() || (!tools_.empty() && !has_tool(tools_, name_))) return Step::refused;
  if (has_arguments_) {
    sink.begin_call(name_);
    sink.add_arguments(arguments_);
    has_begun_ = true;
  }
  return Step::more;
}

Step JsonCall::end_object(CallSink& sink) {
  if (name_.empty()) return Step::refused;
  if (!has_begun_) {
    sink.begin_call(name_);
    sink.add_arguments("{}");
  }
  sink.end_call();
  return Step::last;
}

}  // namespace nanovllm
