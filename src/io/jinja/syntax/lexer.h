// Template text to tokens, with Jinja's rules of white space: `trim_blocks` and `lstrip_blocks` on,
// `-` and `+` marks, one newline at the end of the file dropped.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "io/jinja/value.h"

namespace nanovllm::jinja {

struct Token {
  enum class Kind {
    data,            ///< text between tags
    block_begin,     ///< {%
    block_end,       ///< %}
    variable_begin,  ///< {{
    variable_end,    ///< }}
    name,
    string,
    unavailable,  ///< a string with an escape that this engine cannot read: `text` says why
    integer,
    real,
    op,  ///< `text` is the operator
    end,
  };
  Kind kind;
  int line;
  std::string text;  ///< of data, names and operators; the value of strings
  Int integer = 0;
  double real = 0;

  bool is_op(std::string_view op) const { return kind == Kind::op && text == op; }
  bool is_name(std::string_view name) const { return kind == Kind::name && text == name; }
};

/// Throws Error(model) with `template_name:line:`. The last token is `end`.
std::vector<Token> tokenize(std::string_view source, std::string_view template_name);

}  // namespace nanovllm::jinja
