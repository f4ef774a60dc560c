#include "io/jinja/evaluator.h"

namespace nanovllm::jinja {

Value Evaluator::evaluate(const Expr& expr) {
  const Budget::Level level(runtime_.budget());
  runtime_.budget().spend();
  line_ = expr.line;
  return std::visit([this](const auto& node) { return node_value(node); }, expr.node);
}

Value Evaluator::node_value(const Literal& node) { return node.value; }

Value Evaluator::node_value(const Unavailable& node) { render_fail("{}", node.why); }

Value Evaluator::node_value(const Name& node) {
  for (const Scope* scope = &scopes_.current(); scope != nullptr; scope = scope->parent()) {
    runtime_.budget().spend();
    if (const Value* value = scope->find(node.symbol)) return *value;
  }
  return globals_[static_cast<size_t>(node.symbol)];
}

Value Evaluator::node_value(const ListExpr& node) {
  std::vector<Value> items;
  items.reserve(node.items.size());
  for (const ExprPtr& item : node.items) items.push_back(evaluate(*item));
  return runtime_.sequence(std::move(items),
                           node.is_tuple ? Sequence::Kind::tuple : Sequence::Kind::list);
}

Value Evaluator::node_value(const DictExpr& node) {
  DictItems items;
  for (const auto& [key_expr, value_expr] : node.items) {
    Value key = evaluate(*key_expr);
    items.emplace_back(std::move(key), evaluate(*value_expr));
  }
  return runtime_.dict(std::move(items));
}

Value Evaluator::node_value(const Attribute& node) {
  return get_attribute(runtime_, evaluate(*node.object), node.name);
}

Value Evaluator::node_value(const Subscript& node) {
  const Value object = evaluate(*node.object);
  return get_item(runtime_, object, evaluate(*node.key));
}

Value Evaluator::node_value(const Slice& node) {
  const Value object = evaluate(*node.object);
  Value bounds[3];
  const ExprPtr* exprs[3] = {&node.start, &node.stop, &node.step};
  for (size_t i = 0; i < 3; ++i) bounds[i] = *exprs[i] ? evaluate(**exprs[i]) : Value::none();
  const auto given = [&bounds](size_t i) { return bounds[i].is_none() ? nullptr : &bounds[i]; };
  return get_slice(runtime_, object, given(0), given(1), given(2));
}

Arguments Evaluator::evaluate_arguments(const ArgumentList& list) {
  Arguments arguments;
  arguments.positional.reserve(list.positional.size());
  for (const ExprPtr& expr : list.positional) arguments.positional.push_back(evaluate(*expr));
  for (const auto& [name, expr] : list.named) arguments.named.emplace_back(name, evaluate(*expr));
  if (list.star) {
    const Value star = evaluate(*list.star);
    for (const Value& item : runtime_.iterate(star)) arguments.positional.push_back(item);
  }
  if (list.star_star) {
    const Value star_star = evaluate(*list.star_star);
    if (!star_star.is_dict())
      render_fail("the argument after ** must be a mapping, not {}", star_star.type_name());
    for (const auto& [key, value] : star_star.dict().items) {
      if (!key.is_string()) render_fail("keywords must be strings");
      arguments.named.emplace_back(key.text(), value);
    }
  }
  return arguments;
}

Value Evaluator::call(const Call& node, const Value* caller) {
  const auto* attribute = std::get_if<Attribute>(&node.callee->node);
  if (attribute != nullptr) {  // a method: called at once, without making a value of it
    const Value self = evaluate(*attribute->object);
    const MethodFunction method = find_method(self, attribute->name);
    const Value callee =
        method == nullptr ? get_attribute(runtime_, self, attribute->name) : Value();
    Arguments arguments = evaluate_arguments(node.arguments);
    if (caller != nullptr) arguments.named.emplace_back("caller", *caller);
    return method != nullptr ? method(runtime_, self, arguments)
                             : call_value(runtime_, callee, arguments);
  }
  const Value callee = evaluate(*node.callee);
  Arguments arguments = evaluate_arguments(node.arguments);
  if (caller != nullptr) arguments.named.emplace_back("caller", *caller);
  return call_value(runtime_, callee, arguments);
}

Value Evaluator::node_value(const Call& node) { return call(node, nullptr); }

Value Evaluator::apply_filter(const FilterCall& filter, const Value& input) {
  if (filter.function == nullptr) render_fail("no filter named '{}'", filter.name);
  return filter.function(runtime_, input, evaluate_arguments(filter.arguments));
}

Value Evaluator::node_value(const Filter& node) {
  return apply_filter(node.call, evaluate(*node.input));
}

Value Evaluator::node_value(const Test& node) {
  if (node.function == nullptr) render_fail("no test named '{}'", node.name);
  const Value input = evaluate(*node.input);
  return Value::boolean(node.function(runtime_, input, evaluate_arguments(node.arguments)));
}

Value Evaluator::node_value(const Not& node) {
  return Value::boolean(!evaluate(*node.operand).truth());
}

Value Evaluator::node_value(const Negate& node) {
  const Value operand = evaluate(*node.operand);
  const Value negated = negate(operand);
  if (node.negative) return negated;
  return operand.is_boolean() ? Value::integer(operand.as_integer()) : operand;
}

Value Evaluator::node_value(const Arithmetic& node) {
  Value result = evaluate(*node.first);
  for (const auto& [op, operand] : node.rest)
    result = binary(runtime_, op, result, evaluate(*operand));
  return result;
}

bool Evaluator::compare(CompareOp op, const Value& a, const Value& b) {
  Budget& budget = runtime_.budget();
  switch (op) {
    case CompareOp::eq:
      return equal(budget, a, b);
    case CompareOp::ne:
      return !equal(budget, a, b);
    case CompareOp::lt:
      return less(budget, a, b, "<");
    case CompareOp::gt:
      return less(budget, b, a, ">");
    // Not !(b < a): nothing compares with a NaN.
    case CompareOp::le:
      return less(budget, a, b, "<=") || equal(budget, a, b);
    case CompareOp::ge:
      return less(budget, b, a, ">=") || equal(budget, a, b);
    case CompareOp::in:
      return contains(runtime_, b, a);
    case CompareOp::not_in:
      return !contains(runtime_, b, a);
  }
  return false;
}

Value Evaluator::node_value(const Compare& node) {
  Value left = evaluate(*node.first);
  for (const auto& [op, operand] : node.rest) {
    Value right = evaluate(*operand);
    if (!compare(op, left, right)) return Value::boolean(false);
    left = std::move(right);
  }
  return Value::boolean(true);
}

Value Evaluator::node_value(const Logical& node) {
  Value value;
  for (const ExprPtr& operand : node.operands) {
    value = evaluate(*operand);
    if (value.truth() != node.is_and) break;
  }
  return value;
}

Value Evaluator::node_value(const Concat& node) {
  TextBuilder text(runtime_.budget());
  for (const ExprPtr& part : node.parts) text.append(to_str(runtime_.budget(), evaluate(*part)));
  return runtime_.string(text.take());
}

Value Evaluator::node_value(const Conditional& node) {
  if (evaluate(*node.test).truth()) return evaluate(*node.then);
  if (node.otherwise) return evaluate(*node.otherwise);
  return Value::undefined(
      "the inline if-expression evaluated to false and no else section was defined");
}

}  // namespace nanovllm::jinja
