// Python's way of writing plain values, as models write the arguments of pythonic calls.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace nanovllm {

/// The JSON of a string, number, True, False, None, list, tuple or dictionary with string keys, as
/// Python or JSON spells it; none if `text` is no such value, or is nested over 64 levels.
std::optional<std::string> python_literal_as_json(std::string_view text);

}  // namespace nanovllm
