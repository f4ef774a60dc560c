// One JSON value, checked character by character.
#pragma once

#include <string>
#include <string_view>

#include "chat/calls/call_reader.h"

namespace nanovllm {

/// Strict JSON, at most 64 levels deep.
class JsonScanner {
 public:
  using Step = CallReader::Step;
  /// `last` and `past` tell the value's end; a number ends with what follows it.
  Step take(char c);

 private:
  Step begin_value(char c);
  Step take_string(char c);
  Step take_number(char c);
  Step take_literal(char c);
  Step end_value();

  enum State { value, first_value, key, first_key, colon, after, string, number, literal };
  State state_ = value;
  std::string open_;          // the containers around: '{' and '['
  bool is_key_ = false;       // of the string
  int escape_ = 0;            // 0: none; 1: after a backslash; 2 to 5: 1 to 4 digits of \u missing
  unsigned unit_ = 0;         // of UTF-16, from \u
  bool needs_low_ = false;    // the unit before was the first half of a pair
  char number_ = 0;           // what the number has so far, see take_number
  std::string_view literal_;  // what is left of true, false, null
};

/// One call as JSON: {"name": "f", "arguments": {...}}, or "parameters", in any order. Other
/// members are skipped.
class JsonCall {
 public:
  using Step = CallReader::Step;
  /// Empty: any name will do. Otherwise the name is one of them, and what comes before it is
  /// "type", "id" or the arguments. `tools` outlives the reader.
  explicit JsonCall(std::span<const Tool> tools = {}) : tools_(tools) {}

  /// From the "{" on. `last` where the call has ended.
  Step take(char c, CallSink& sink);

 private:
  Step take_value(char c, CallSink& sink);
  Step end_member(CallSink& sink);
  Step end_object(CallSink& sink);

  std::span<const Tool> tools_;
  enum State { start, first_key, key, in_key, colon, before_value, in_value, after_value };
  State state_ = start;
  JsonScanner scanner_;
  std::string text_;  // of the key or value at hand, where it is needed
  enum { name, arguments, other } member_ = other;
  std::string name_, arguments_;  // arguments that came before the name
  bool has_arguments_ = false, has_begun_ = false;
};

}  // namespace nanovllm
