// The expression half of the parser, lowest precedence first.
#include <algorithm>

#include "io/jinja/syntax/parser.h"

namespace nanovllm::jinja {

ExprPtr Parser::parse_expression(bool with_conditional) {
  const Level level(*this);
  return with_conditional ? parse_conditional() : parse_or();
}

/// One expression, or a tuple where commas follow. `end_name` is a name that ends it beside the
/// closing brackets.
ExprPtr Parser::parse_tuple(bool with_conditional, bool in_parentheses, std::string_view end_name) {
  const int line = current().line;
  std::vector<ExprPtr> items;
  bool is_tuple = false;
  while (true) {
    const Token& token = current();
    if (token.kind == Token::Kind::variable_end || token.kind == Token::Kind::block_end ||
        token.is_op(")") || (!end_name.empty() && token.is_name(end_name))) {
      break;
    }
    items.push_back(parse_expression(with_conditional));
    if (!skip_op(",")) break;
    is_tuple = true;
  }
  if (!is_tuple && !items.empty()) return std::move(items[0]);
  if (!is_tuple && !in_parentheses)
    syntax_error("expected an expression, got {}", describe(current()));
  return make(ListExpr{std::move(items), true}, line);
}

ExprPtr Parser::parse_conditional() {
  int line = current().line;
  ExprPtr expr = parse_or();
  while (skip_name("if")) {
    ExprPtr test = parse_or();
    ExprPtr otherwise;
    if (skip_name("else")) {
      const Level level(*this);
      otherwise = parse_conditional();
    }
    expr = make(Conditional{std::move(test), std::move(expr), std::move(otherwise)}, line);
    line = current().line;
  }
  return expr;
}

ExprPtr Parser::parse_or() {
  const int line = current().line;
  ExprPtr first = parse_and();
  if (!current().is_name("or")) return first;
  Logical node{false, {}};
  node.operands.push_back(std::move(first));
  while (skip_name("or")) node.operands.push_back(parse_and());
  return make(std::move(node), line);
}

ExprPtr Parser::parse_and() {
  const int line = current().line;
  ExprPtr first = parse_not();
  if (!current().is_name("and")) return first;
  Logical node{true, {}};
  node.operands.push_back(std::move(first));
  while (skip_name("and")) node.operands.push_back(parse_not());
  return make(std::move(node), line);
}

ExprPtr Parser::parse_not() {
  const int line = current().line;
  if (!skip_name("not")) return parse_compare();
  const Level level(*this);
  return make(Not{parse_not()}, line);
}

ExprPtr Parser::parse_compare() {
  static constexpr std::pair<std::string_view, CompareOp> kOperators[] = {
      {"==", CompareOp::eq}, {"!=", CompareOp::ne}, {"<", CompareOp::lt},
      {"<=", CompareOp::le}, {">", CompareOp::gt},  {">=", CompareOp::ge}};
  const int line = current().line;
  Compare node{parse_sum(), {}};
  while (true) {
    const auto* op =
        std::find_if(std::begin(kOperators), std::end(kOperators),
                     [this](const auto& candidate) { return current().is_op(candidate.first); });
    if (op != std::end(kOperators)) {
      next();
      node.rest.emplace_back(op->second, parse_sum());
    } else if (skip_name("in")) {
      node.rest.emplace_back(CompareOp::in, parse_sum());
    } else if (current().is_name("not") && ahead().is_name("in")) {
      next();
      next();
      node.rest.emplace_back(CompareOp::not_in, parse_sum());
    } else {
      break;
    }
  }
  if (node.rest.empty()) return std::move(node.first);
  return make(std::move(node), line);
}

ExprPtr Parser::parse_sum() {
  const int line = current().line;
  Arithmetic node{parse_concat(), {}};
  while (current().is_op("+") || current().is_op("-")) {
    const BinaryOp op = next().text == "+" ? BinaryOp::add : BinaryOp::subtract;
    node.rest.emplace_back(op, parse_concat());
  }
  if (node.rest.empty()) return std::move(node.first);
  return make(std::move(node), line);
}

ExprPtr Parser::parse_concat() {
  const int line = current().line;
  ExprPtr first = parse_product();
  if (!current().is_op("~")) return first;
  Concat node;
  node.parts.push_back(std::move(first));
  while (skip_op("~")) node.parts.push_back(parse_product());
  return make(std::move(node), line);
}

ExprPtr Parser::parse_product() {
  const int line = current().line;
  Arithmetic node{parse_power(), {}};
  while (true) {
    BinaryOp op{};
    if (current().is_op("*"))
      op = BinaryOp::multiply;
    else if (current().is_op("/"))
      op = BinaryOp::divide;
    else if (current().is_op("//"))
      op = BinaryOp::floor_divide;
    else if (current().is_op("%"))
      op = BinaryOp::modulo;
    else
      break;
    next();
    node.rest.emplace_back(op, parse_power());
  }
  if (node.rest.empty()) return std::move(node.first);
  return make(std::move(node), line);
}

ExprPtr Parser::parse_power() {
  const int line = current().line;
  Arithmetic node{parse_unary(), {}};
  while (skip_op("**")) node.rest.emplace_back(BinaryOp::power, parse_unary());
  if (node.rest.empty()) return std::move(node.first);
  return make(std::move(node), line);
}

ExprPtr Parser::parse_unary(bool with_filter) {
  const int line = current().line;
  ExprPtr expr;
  if (current().is_op("-") || current().is_op("+")) {
    const Level level(*this);
    const bool negative = next().text == "-";
    expr = make(Negate{parse_unary(false), negative}, line);
  } else {
    expr = parse_primary();
  }
  expr = parse_postfix(std::move(expr));
  return with_filter ? parse_filters(std::move(expr)) : std::move(expr);
}

ExprPtr Parser::parse_primary() {
  const int line = current().line;
  switch (current().kind) {
    case Token::Kind::name:
      return parse_name_or_constant();
    case Token::Kind::string:
    case Token::Kind::unavailable:
      return parse_strings(line);
    case Token::Kind::integer:
      return make(Literal{Value::integer(next().integer)}, line);
    case Token::Kind::real:
      return make(Literal{Value::real(next().real)}, line);
    default:
      break;
  }
  if (skip_op("(")) {
    ExprPtr expr = parse_tuple(true, true);
    expect_op(")");
    return expr;
  }
  if (current().is_op("[")) return parse_list();
  if (current().is_op("{")) return parse_dict();
  syntax_error("unexpected {}", describe(current()));
}

ExprPtr Parser::parse_name_or_constant() {
  const Token& token = next();
  const std::string& name = token.text;
  if (name == "true" || name == "True") return make(Literal{Value::boolean(true)}, token.line);
  if (name == "false" || name == "False") return make(Literal{Value::boolean(false)}, token.line);
  if (name == "none" || name == "None") return make(Literal{Value::none()}, token.line);
  return make(Name{symbol(name)}, token.line);
}

/// Strings one after the other are one.
ExprPtr Parser::parse_strings(int line) {
  std::string text, why;
  while (current().kind == Token::Kind::string || current().kind == Token::Kind::unavailable) {
    const Token& token = next();
    (token.kind == Token::Kind::string ? text : why) += token.text;
  }
  if (!why.empty()) return make(Unavailable{std::move(why)}, line);
  return make(Literal{Value::literal(std::move(text))}, line);
}

ExprPtr Parser::parse_list() {
  const int line = current().line;
  expect_op("[");
  ListExpr node{{}, false};
  while (!current().is_op("]")) {
    if (!node.items.empty()) expect_op(",");
    if (current().is_op("]")) break;
    node.items.push_back(parse_expression());
  }
  expect_op("]");
  return make(std::move(node), line);
}

ExprPtr Parser::parse_dict() {
  const int line = current().line;
  expect_op("{");
  DictExpr node;
  while (!current().is_op("}")) {
    if (!node.items.empty()) expect_op(",");
    if (current().is_op("}")) break;
    ExprPtr key = parse_expression();
    expect_op(":");
    node.items.emplace_back(std::move(key), parse_expression());
  }
  expect_op("}");
  return make(std::move(node), line);
}

ExprPtr Parser::parse_postfix(ExprPtr expr) {
  while (true) {
    const int line = current().line;
    if (current().is_op(".")) {
      expr = parse_dot(std::move(expr));
    } else if (current().is_op("[")) {
      expr = parse_subscript(std::move(expr));
    } else if (current().is_op("(")) {
      ArgumentList arguments = parse_arguments();
      expr = make(Call{std::move(expr), std::move(arguments)}, line);
    } else {
      return expr;
    }
  }
}

ExprPtr Parser::parse_filters(ExprPtr expr) {
  while (true) {
    const int line = current().line;
    if (skip_op("|")) {
      FilterCall call = parse_filter_call();
      expr = make(Filter{std::move(expr), std::move(call)}, line);
    } else if (current().is_name("is")) {
      expr = parse_test(std::move(expr));
    } else if (current().is_op("(")) {  // what a filter or test gave can be called
      ArgumentList arguments = parse_arguments();
      expr = make(Call{std::move(expr), std::move(arguments)}, line);
    } else {
      return expr;
    }
  }
}

ExprPtr Parser::parse_dot(ExprPtr object) {
  const int line = current().line;
  expect_op(".");
  if (current().kind == Token::Kind::integer) {
    ExprPtr key = make(Literal{Value::integer(next().integer)}, line);
    return make(Subscript{std::move(object), std::move(key)}, line);
  }
  return make(Attribute{std::move(object), identifier()}, line);
}

ExprPtr Parser::parse_subscript(ExprPtr object) {
  const int line = current().line;
  expect_op("[");
  ExprPtr start;
  if (!current().is_op(":")) {
    ExprPtr key = parse_expression();
    if (current().is_op(",")) {
      ListExpr tuple{{}, true};
      tuple.items.push_back(std::move(key));
      while (skip_op(",")) tuple.items.push_back(parse_expression());
      key = make(std::move(tuple), line);
    }
    if (skip_op("]")) return make(Subscript{std::move(object), std::move(key)}, line);
    start = std::move(key);
  }
  expect_op(":");
  const auto bound = [this] {
    return current().is_op(":") || current().is_op("]") ? ExprPtr() : parse_expression();
  };
  ExprPtr stop = bound();
  ExprPtr step = skip_op(":") ? bound() : ExprPtr();
  expect_op("]");
  return make(Slice{std::move(object), std::move(start), std::move(stop), std::move(step)}, line);
}

ExprPtr Parser::parse_test(ExprPtr input) {
  const int line = current().line;
  expect_name("is");
  const bool negated = skip_name("not");
  Test test{std::move(input), identifier(), nullptr, {}};
  test.function = find_test(test.name);
  const Token& token = current();
  const bool operand = token.kind == Token::Kind::name || token.kind == Token::Kind::string ||
                       token.kind == Token::Kind::unavailable ||
                       token.kind == Token::Kind::integer || token.kind == Token::Kind::real ||
                       token.is_op("[") || token.is_op("{");
  if (token.is_op("(")) {
    test.arguments = parse_arguments();
  } else if (operand && !token.is_name("else") && !token.is_name("or") && !token.is_name("and")) {
    if (token.is_name("is")) syntax_error("tests can't be chained with 'is'");
    const Level level(*this);
    test.arguments.positional.push_back(parse_postfix(parse_primary()));
  }
  ExprPtr expr = make(std::move(test), line);
  return negated ? make(Not{std::move(expr)}, line) : std::move(expr);
}

FilterCall Parser::parse_filter_call() {
  const int line = current().line;
  FilterCall call{identifier(), nullptr, {}, line};
  call.function = find_filter(call.name);
  if (current().is_op("(")) call.arguments = parse_arguments();
  return call;
}

ArgumentList Parser::parse_arguments() {
  ArgumentList arguments;
  const auto ensure = [this](bool valid) {
    if (!valid) syntax_error("positional arguments come first, then keywords, then '**'");
  };
  expect_op("(");
  bool comma_due = false;
  while (!current().is_op(")")) {
    if (comma_due) {
      expect_op(",");
      if (current().is_op(")")) break;
    }
    comma_due = true;
    if (skip_op("*")) {
      ensure(arguments.star == nullptr && arguments.star_star == nullptr);
      arguments.star = parse_expression();
    } else if (skip_op("**")) {
      ensure(arguments.star_star == nullptr);
      arguments.star_star = parse_expression();
    } else if (current().kind == Token::Kind::name && ahead().is_op("=")) {
      ensure(arguments.star_star == nullptr);
      std::string name = next().text;
      next();
      arguments.named.emplace_back(std::move(name), parse_expression());
    } else {
      ensure(arguments.star == nullptr && arguments.star_star == nullptr &&
             arguments.named.empty());
      arguments.positional.push_back(parse_expression());
    }
  }
  expect_op(")");
  return arguments;
}

}  // namespace nanovllm::jinja
