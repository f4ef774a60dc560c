// Parser::make: the one place where expressions come into being, and where their depth is checked.
#include <algorithm>

#include "io/jinja/syntax/parser.h"

namespace nanovllm::jinja {

namespace {

/// Depth of the deepest child of a node.
struct ChildDepth {
  int depth = 0;

  void see(const ExprPtr& child) {
    if (child != nullptr) depth = std::max(depth, child->depth);
  }
  template <class... Children>
  void see(const ExprPtr& child, const Children&... others) {
    see(child);
    see(others...);
  }
  void see(const std::vector<ExprPtr>& children) {
    for (const ExprPtr& child : children) see(child);
  }
  template <class Key>
  void see(const std::vector<std::pair<Key, ExprPtr>>& children) {
    for (const auto& child : children) see(child.second);
  }
  void see(const ArgumentList& arguments) {
    see(arguments.positional);
    see(arguments.named);
    see(arguments.star, arguments.star_star);
  }

  void operator()(const Literal&) {}
  void operator()(const Unavailable&) {}
  void operator()(const Name&) {}
  void operator()(const ListExpr& n) { see(n.items); }
  void operator()(const DictExpr& n) {
    see(n.items);
    for (const auto& item : n.items) see(item.first);
  }
  void operator()(const Attribute& n) { see(n.object); }
  void operator()(const Subscript& n) { see(n.object, n.key); }
  void operator()(const Slice& n) { see(n.object, n.start, n.stop, n.step); }
  void operator()(const Call& n) {
    see(n.callee);
    see(n.arguments);
  }
  void operator()(const Filter& n) {
    see(n.input);
    see(n.call.arguments);
  }
  void operator()(const Test& n) {
    see(n.input);
    see(n.arguments);
  }
  void operator()(const Not& n) { see(n.operand); }
  void operator()(const Negate& n) { see(n.operand); }
  void operator()(const Arithmetic& n) {
    see(n.first);
    see(n.rest);
  }
  void operator()(const Compare& n) {
    see(n.first);
    see(n.rest);
  }
  void operator()(const Logical& n) { see(n.operands); }
  void operator()(const Concat& n) { see(n.parts); }
  void operator()(const Conditional& n) { see(n.test, n.then, n.otherwise); }
};

}  // namespace

ExprPtr Parser::make(Expr::Node node, int line) {
  ChildDepth children;
  std::visit(children, node);
  if (children.depth >= kMaxExprDepth)
    syntax_error("an expression nests deeper than {} levels", kMaxExprDepth);
  return std::make_unique<Expr>(Expr{std::move(node), line, children.depth + 1});
}

}  // namespace nanovllm::jinja
