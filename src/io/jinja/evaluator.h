// Runs a parsed template: a walk over the tree.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "io/jinja/syntax/ast.h"

namespace nanovllm::jinja {

/// Variables of one block. Looked up from the innermost scope outwards; set in the innermost.
class Scope {
 public:
  explicit Scope(Scope* parent) : parent_(parent) {}

  Scope* parent() const { return parent_; }
  void set(Symbol symbol, Value value);
  const Value* find(Symbol symbol) const;

 private:
  friend class ScopeStack;
  Scope* parent_;
  std::vector<std::pair<Symbol, Value>> variables_;
  bool captured_ = false;  // a macro refers to it, so it stays until the render ends
};

/// The scope of the current place. Scopes die with their block unless a macro has captured them.
class ScopeStack {
 public:
  explicit ScopeStack(Scope& root) : current_(&root) {}

  Scope& current() { return *current_; }
  /// Marks the current scope and those around it as captured.
  Scope& capture(Budget& budget);

  /// Enters a new scope inside `parent` for as long as it lives.
  class Entered {
   public:
    Entered(ScopeStack& stack, Scope* parent);
    explicit Entered(ScopeStack& stack) : Entered(stack, stack.current_) {}
    ~Entered();
    Entered(const Entered&) = delete;
    Entered& operator=(const Entered&) = delete;

   private:
    ScopeStack& stack_;
    Scope* previous_;
    std::unique_ptr<Scope> scope_;
  };

 private:
  Scope* current_;
  std::vector<std::unique_ptr<Scope>> kept_;
};

class Evaluator {
 public:
  Evaluator(const Template& source, Runtime& runtime, const Json& context);

  std::string run();
  /// The line being worked on, for errors.
  int line() const { return line_; }

  Runtime& runtime() { return runtime_; }
  const Template& source() const { return template_; }

  /// Calls a macro: binds the arguments in a new scope inside `scope` and gives the text of the
  /// body.
  Value call_macro(const MacroCode& code, Scope* scope, const Arguments& arguments);
  /// The body of a `for` over `items`, to the current output. `depth0` counts recursive calls of
  /// the loop.
  void run_loop(const For& loop, Scope* scope, const Value& items, int depth0);
  /// Text of a recursive call `loop(items)`.
  Value recurse(const For& loop, Scope* scope, const Value& items, int depth0);
  /// Does `item` pass the loop's `if`?
  bool passes(const For& loop, Scope* scope, const Value& item);

 private:
  enum class Flow { next, break_loop, continue_loop };

  // Statements (evaluator.cpp).
  Flow execute(const Body& body);
  Flow execute(const Statement& statement);
  Flow run_node(const Text& node);
  Flow run_node(const Print& node);
  Flow run_node(const Set& node);
  Flow run_node(const SetBlock& node);
  Flow run_node(const If& node);
  Flow run_node(const For& node);
  Flow run_node(const LoopControl& node);
  Flow run_node(const MacroDefinition& node);
  Flow run_node(const CallBlock& node);
  Flow run_node(const FilterBlock& node);
  Flow run_node(const With& node);
  Flow run_node(const Scoped& node);
  Flow run_node(const Autoescape& node);
  [[noreturn]] Flow run_node(const Unavailable& node);
  Flow run_body(const Body& body);  // in a scope of its own
  void write(std::string_view text);
  void assign(const Target& target, const Value& value);
  Value capture(const Body& body);
  Value apply_filters(const std::vector<FilterCall>& filters, Value value);
  Value macro_value(const MacroCode& code);

  // Expressions (evaluate_expression.cpp).
  Value evaluate(const Expr& expr);
  Value node_value(const Literal& node);
  [[noreturn]] Value node_value(const Unavailable& node);
  Value node_value(const Name& node);
  Value node_value(const ListExpr& node);
  Value node_value(const DictExpr& node);
  Value node_value(const Attribute& node);
  Value node_value(const Subscript& node);
  Value node_value(const Slice& node);
  Value node_value(const Call& node);
  Value node_value(const Filter& node);
  Value node_value(const Test& node);
  Value node_value(const Not& node);
  Value node_value(const Negate& node);
  Value node_value(const Arithmetic& node);
  Value node_value(const Compare& node);
  Value node_value(const Logical& node);
  Value node_value(const Concat& node);
  Value node_value(const Conditional& node);
  Value call(const Call& node, const Value* caller);
  Value apply_filter(const FilterCall& filter, const Value& input);
  Arguments evaluate_arguments(const ArgumentList& list);
  bool compare(CompareOp op, const Value& a, const Value& b);

  const Template& template_;
  Runtime& runtime_;
  std::vector<Value>
      globals_;  // of each symbol outside of all scopes: context, function or undefined
  Scope root_{nullptr};
  ScopeStack scopes_{root_};
  TextBuilder* output_ = nullptr;
  int line_ = 1;
};

}  // namespace nanovllm::jinja
