// The parsed template.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "io/jinja/runtime.h"

namespace nanovllm::jinja {

/// Expressions nest at most this deep, so that walking and freeing them recursively is safe.
inline constexpr int kMaxExprDepth = 200;
/// Blocks in blocks, brackets in brackets.
inline constexpr int kMaxSourceNesting = 100;

struct Expr;
using ExprPtr = std::unique_ptr<Expr>;
/// A name of the template, as an index into Template::symbols.
using Symbol = int;

struct ArgumentList {
  std::vector<ExprPtr> positional;
  std::vector<std::pair<std::string, ExprPtr>> named;
  ExprPtr star;       ///< f(*star), null if absent
  ExprPtr star_star;  ///< f(**star_star), null if absent
};

struct FilterCall {
  std::string name;
  FilterFunction function;  ///< null where no such filter exists: an error when it is reached
  ArgumentList arguments;
  int line;
};

struct Literal {
  Value value;
};
/// Syntax that Jinja has and this engine has not: an error when it is reached. Also a statement.
struct Unavailable {
  std::string why;
};
struct Name {
  Symbol symbol;
};
struct ListExpr {
  std::vector<ExprPtr> items;
  bool is_tuple;
};
struct DictExpr {
  std::vector<std::pair<ExprPtr, ExprPtr>> items;
};
struct Attribute {
  ExprPtr object;
  std::string name;
};
struct Subscript {
  ExprPtr object;
  ExprPtr key;
};
struct Slice {
  ExprPtr object;
  ExprPtr start, stop, step;  ///< null: open
};
struct Call {
  ExprPtr callee;
  ArgumentList arguments;
};
struct Filter {
  ExprPtr input;
  FilterCall call;
};
struct Test {
  ExprPtr input;
  std::string name;
  TestFunction function;
  ArgumentList arguments;
};
struct Not {
  ExprPtr operand;
};
struct Negate {
  ExprPtr operand;
  bool negative;  ///< false for a unary plus
};
/// a + b - c and so on, left to right. A chain and not a tree: templates join long rows of strings
/// this way.
struct Arithmetic {
  ExprPtr first;
  std::vector<std::pair<BinaryOp, ExprPtr>> rest;
};
enum class CompareOp { eq, ne, lt, le, gt, ge, in, not_in };
struct Compare {
  ExprPtr first;
  std::vector<std::pair<CompareOp, ExprPtr>> rest;
};
struct Logical {
  bool is_and;
  std::vector<ExprPtr> operands;
};
struct Concat {
  std::vector<ExprPtr> parts;
};
struct Conditional {
  ExprPtr test, then, otherwise;  ///< `otherwise` may be null: undefined
};

struct Expr {
  using Node = std::variant<Literal, Unavailable, Name, ListExpr, DictExpr, Attribute, Subscript,
                            Slice, Call, Filter, Test, Not, Negate, Arithmetic, Compare, Logical,
                            Concat, Conditional>;
  Node node;
  int line;
  int depth = 1;
};

struct Statement;
using Body = std::vector<Statement>;

/// Where an assignment goes: a name, an attribute of a namespace, or a tuple of targets.
struct Target {
  enum class Kind { name, attribute, tuple };
  Kind kind = Kind::name;
  Symbol symbol = 0;
  std::string attribute;
  std::vector<Target> items;
};

struct Text {
  std::string text;
};
struct Print {
  ExprPtr value;
};
struct Set {
  Target target;
  ExprPtr value;
};
struct SetBlock {
  Target target;
  std::vector<FilterCall> filters;
  Body body;
};
struct If {
  std::vector<std::pair<ExprPtr, Body>> branches;
  Body otherwise;
};
struct For {
  Target target;
  ExprPtr iterable;
  ExprPtr condition;  ///< null if absent
  bool recursive = false;
  Body body;
  Body otherwise;
};
struct LoopControl {
  bool is_break;
};
/// A macro, or the body of a call block.
struct MacroCode {
  std::string name;
  std::vector<std::pair<Symbol, ExprPtr>> parameters;  ///< with default, or null
  Body body;
  bool uses_caller = false, uses_varargs = false, uses_kwargs = false;
};
struct MacroDefinition {
  Symbol symbol;
  MacroCode code;
};
struct CallBlock {
  MacroCode caller;
  ExprPtr call;  ///< a Call
};
struct FilterBlock {
  std::vector<FilterCall> filters;
  Body body;
};
struct With {
  std::vector<std::pair<Target, ExprPtr>> bindings;
  Body body;
};
/// A body with variables of its own and no other effect: `generation`, `block`.
struct Scoped {
  Body body;
};
struct Autoescape {
  ExprPtr on;
  Body body;
};

struct Statement {
  std::variant<Text, Print, Set, SetBlock, If, For, LoopControl, MacroDefinition, CallBlock,
               FilterBlock, With, Scoped, Autoescape, Unavailable>
      node;
  int line;
};

struct Template {
  std::string name;
  std::vector<std::string> symbols;
  Symbol caller = 0, varargs = 0, kwargs = 0, loop = 0;  ///< names with a meaning of their own
  Body body;
};

/// Parses a template; see ChatTemplate's constructor for the errors.
Template parse_template(std::string_view source, std::string name);

}  // namespace nanovllm::jinja
