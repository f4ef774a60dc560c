#include "io/jinja/syntax/parser.h"

#include <algorithm>

namespace nanovllm::jinja {

Template parse_template(std::string_view source, std::string name) {
  return Parser(source, std::move(name)).run();
}

Parser::Parser(std::string_view source, std::string name) : tokens_(tokenize(source, name)) {
  template_.name = std::move(name);
  template_.caller = symbol("caller");
  template_.varargs = symbol("varargs");
  template_.kwargs = symbol("kwargs");
  template_.loop = symbol("loop");
}

Template Parser::run() {
  template_.body = parse_body({});
  return std::move(template_);
}

bool Parser::skip_op(std::string_view op) {
  if (!current().is_op(op)) return false;
  next();
  return true;
}

bool Parser::skip_name(std::string_view name) {
  if (!current().is_name(name)) return false;
  next();
  return true;
}

void Parser::expect_op(std::string_view op) {
  if (!skip_op(op)) syntax_error("expected '{}', got {}", op, describe(current()));
}

void Parser::expect_name(std::string_view name) {
  if (!skip_name(name)) syntax_error("expected '{}', got {}", name, describe(current()));
}

void Parser::expect(Token::Kind kind) {
  if (current().kind != kind)
    syntax_error("expected {}, got {}", describe(Token{kind, 0, "", 0, 0}), describe(current()));
  next();
}

std::string Parser::identifier() {
  if (current().kind != Token::Kind::name)
    syntax_error("expected a name, got {}", describe(current()));
  return next().text;
}

std::string Parser::describe(const Token& token) {
  switch (token.kind) {
    case Token::Kind::data:
      return "template text";
    case Token::Kind::block_begin:
      return "'{%'";
    case Token::Kind::block_end:
      return "'%}'";
    case Token::Kind::variable_begin:
      return "'{{'";
    case Token::Kind::variable_end:
      return "'}}'";
    case Token::Kind::string:
    case Token::Kind::unavailable:
      return "a string";
    case Token::Kind::integer:
    case Token::Kind::real:
      return "a number";
    case Token::Kind::end:
      return "the end of the template";
    case Token::Kind::name:
    case Token::Kind::op:
      break;
  }
  return fmt::format("'{}'", token.text.substr(0, 60));
}

Symbol Parser::symbol(const std::string& name) {
  const auto [place, added] =
      symbols_.try_emplace(name, static_cast<Symbol>(template_.symbols.size()));
  if (added) template_.symbols.push_back(name);
  for (MacroCode* macro : macros_) {  // what a macro mentions decides which of these it accepts
    if (place->second == template_.caller) macro->uses_caller = true;
    if (place->second == template_.varargs) macro->uses_varargs = true;
    if (place->second == template_.kwargs) macro->uses_kwargs = true;
  }
  return place->second;
}

Body Parser::parse_body(std::initializer_list<std::string_view> ends) {
  const Level level(*this);
  Body body;
  while (current().kind != Token::Kind::end) {
    const int line = current().line;
    if (current().kind == Token::Kind::data) {
      body.push_back({Text{next().text}, line});
    } else if (current().kind == Token::Kind::variable_begin) {
      next();
      body.push_back({Print{parse_tuple()}, line});
      expect(Token::Kind::variable_end);
    } else {
      expect(Token::Kind::block_begin);
      if (current().kind == Token::Kind::name &&
          std::find(ends.begin(), ends.end(), current().text) != ends.end()) {
        return body;
      }
      body.push_back(parse_statement());
      expect(Token::Kind::block_end);
    }
  }
  if (ends.size() > 0)
    syntax_error("unexpected end of the template: '{}' is missing", *(ends.end() - 1));
  return body;
}

/// From before the `%}` of the opening tag to the name of the closing one.
Body Parser::parse_block_body(std::initializer_list<std::string_view> ends) {
  skip_op(":");
  expect(Token::Kind::block_end);
  return parse_body(ends);
}

Body Parser::parse_closed_body(std::string_view end) {
  Body body = parse_block_body({end});
  next();
  return body;
}

Statement Parser::parse_statement() {
  const int line = current().line;
  const std::string tag = identifier();
  if (tag == "set") return parse_set(line);
  if (tag == "if") return parse_if(line);
  if (tag == "for") return parse_for(line);
  if (tag == "macro") return parse_macro(line);
  if (tag == "call") return parse_call_block(line);
  if (tag == "with") return parse_with(line);
  if (tag == "break" || tag == "continue") {
    if (loops_ == 0) syntax_error("'{}' outside of a loop", tag);
    return {LoopControl{tag == "break"}, line};
  }
  if (tag == "filter") {
    FilterBlock block{parse_filter_chain(true), {}};
    block.body = parse_closed_body("endfilter");
    return {std::move(block), line};
  }
  if (tag == "generation" || tag == "block") return parse_scoped(line, tag);
  if (tag == "autoescape") {
    ExprPtr on = parse_expression();
    return {Autoescape{std::move(on), parse_closed_body("endautoescape")}, line};
  }
  if (tag == "print") {  // the values one after the other: not a tuple
    Concat values;
    do {
      values.parts.push_back(parse_expression());
    } while (skip_op(","));
    return {Print{make(std::move(values), line)}, line};
  }
  if (tag == "include" || tag == "import" || tag == "from" || tag == "extends") {
    while (current().kind != Token::Kind::block_end && current().kind != Token::Kind::end) next();
    return {Unavailable{fmt::format("'{}' is not available: a chat template stands alone", tag)},
            line};
  }
  syntax_error("unknown tag '{}'", tag);
}

Statement Parser::parse_set(int line) {
  Target target = parse_target(true);
  if (skip_op("=")) return {Set{std::move(target), parse_tuple()}, line};
  SetBlock block{std::move(target), parse_filter_chain(false), {}};
  block.body = parse_closed_body("endset");
  return {std::move(block), line};
}

Statement Parser::parse_if(int line) {
  If result;
  while (true) {
    ExprPtr test = parse_tuple(false);
    Body body = parse_block_body({"elif", "else", "endif"});
    result.branches.emplace_back(std::move(test), std::move(body));
    if (skip_name("elif")) continue;
    if (skip_name("else")) {
      result.otherwise = parse_closed_body("endif");
    } else {
      expect_name("endif");
    }
    return {std::move(result), line};
  }
}

Statement Parser::parse_for(int line) {
  For loop;
  loop.target = parse_target(false);
  expect_name("in");
  loop.iterable = parse_tuple(false, false, "recursive");
  if (skip_name("if")) loop.condition = parse_expression();
  loop.recursive = skip_name("recursive");
  ++loops_;
  loop.body = parse_block_body({"else", "endfor"});
  --loops_;
  if (skip_name("else")) {
    loop.otherwise = parse_closed_body("endfor");
  } else {
    expect_name("endfor");
  }
  return {std::move(loop), line};
}

void Parser::parse_signature(MacroCode& code) {
  expect_op("(");
  while (!current().is_op(")")) {
    if (!code.parameters.empty()) expect_op(",");
    const Symbol parameter = symbol(identifier());
    ExprPtr fallback;
    if (skip_op("=")) {
      fallback = parse_expression();
    } else if (!code.parameters.empty() && code.parameters.back().second != nullptr) {
      syntax_error("a parameter without a default follows one with a default");
    }
    code.parameters.emplace_back(parameter, std::move(fallback));
  }
  expect_op(")");
}

Body Parser::parse_macro_body(MacroCode& code, std::string_view end) {
  macros_.push_back(&code);
  const int loops = std::exchange(loops_, 0);
  Body body = parse_closed_body(end);
  loops_ = loops;
  macros_.pop_back();
  return body;
}

Statement Parser::parse_macro(int line) {
  MacroDefinition macro;
  macro.code.name = identifier();
  macro.symbol = symbol(macro.code.name);
  parse_signature(macro.code);
  macro.code.body = parse_macro_body(macro.code, "endmacro");
  return {std::move(macro), line};
}

Statement Parser::parse_call_block(int line) {
  CallBlock block;
  block.caller.name = "caller";
  if (current().is_op("(")) parse_signature(block.caller);
  block.call = parse_expression();
  if (!std::holds_alternative<Call>(block.call->node)) syntax_error("a call block needs a call");
  block.caller.body = parse_macro_body(block.caller, "endcall");
  return {std::move(block), line};
}

Statement Parser::parse_with(int line) {
  With with;
  while (current().kind != Token::Kind::block_end && !current().is_op(":")) {
    if (!with.bindings.empty()) expect_op(",");
    Target target = parse_target(false, false);
    expect_op("=");
    with.bindings.emplace_back(std::move(target), parse_expression());
  }
  with.body = parse_closed_body("endwith");
  return {std::move(with), line};
}

Statement Parser::parse_scoped(int line, std::string_view tag) {
  std::string name;
  if (tag == "block") {
    name = identifier();
    if (!skip_name("scoped")) skip_name("required");
  }
  Scoped scoped{parse_closed_body(tag == "block" ? "endblock" : "endgeneration")};
  if (tag == "block") skip_name(name);
  return {std::move(scoped), line};
}

Target Parser::parse_single_target(bool with_attribute) {
  const Level level(*this);
  if (skip_op("(")) {
    Target target = parse_target(with_attribute);
    expect_op(")");
    return target;
  }
  static constexpr std::string_view kConstants[] = {"true", "false", "none",
                                                    "True", "False", "None"};
  if (std::find(std::begin(kConstants), std::end(kConstants), current().text) !=
      std::end(kConstants)) {
    syntax_error("can't assign to '{}'", current().text);
  }
  Target target;
  target.symbol = symbol(identifier());
  if (with_attribute && skip_op(".")) {
    target.kind = Target::Kind::attribute;
    target.attribute = identifier();
  }
  return target;
}

Target Parser::parse_target(bool with_attribute, bool with_tuple) {
  Target first = parse_single_target(with_attribute);
  if (!with_tuple || !current().is_op(",")) return first;
  Target tuple;
  tuple.kind = Target::Kind::tuple;
  tuple.items.push_back(std::move(first));
  while (skip_op(",")) {
    if (current().kind != Token::Kind::name && !current().is_op("(")) break;
    if (current().is_name("in")) break;
    tuple.items.push_back(parse_single_target(with_attribute));
  }
  return tuple;
}

std::vector<FilterCall> Parser::parse_filter_chain(bool first_is_bare) {
  std::vector<FilterCall> filters;
  if (first_is_bare) filters.push_back(parse_filter_call());
  while (skip_op("|")) filters.push_back(parse_filter_call());
  return filters;
}

}  // namespace nanovllm::jinja
