#include "io/jinja/evaluator.h"

#include <nlohmann/json.hpp>

#include "io/jinja/loop.h"

namespace nanovllm::jinja {

namespace {

class MacroObject final : public Object {
 public:
  MacroObject(Evaluator& evaluator, const MacroCode& code, Scope* scope)
      : evaluator_(evaluator), code_(code), scope_(scope) {}

  std::string_view type_name() const override { return "Macro"; }
  bool is_callable() const override { return true; }
  Value call(Runtime&, const Arguments& arguments) override {
    return evaluator_.call_macro(code_, scope_, arguments);
  }
  std::optional<Value> attribute(Runtime& runtime, std::string_view name) override {
    if (name == "name") return runtime.string(code_.name);
    return std::nullopt;
  }

 private:
  Evaluator& evaluator_;
  const MacroCode& code_;
  Scope* scope_;
};

}  // namespace

void Scope::set(Symbol symbol, Value value) {
  for (auto& [name, slot] : variables_) {
    if (name == symbol) {
      slot = std::move(value);
      return;
    }
  }
  variables_.emplace_back(symbol, std::move(value));
}

const Value* Scope::find(Symbol symbol) const {
  for (const auto& [name, value] : variables_) {
    if (name == symbol) return &value;
  }
  return nullptr;
}

Scope& ScopeStack::capture(Budget& budget) {
  for (Scope* scope = current_; scope != nullptr && !scope->captured_; scope = scope->parent_) {
    budget.hold(sizeof(Scope));
    scope->captured_ = true;
  }
  return *current_;
}

ScopeStack::Entered::Entered(ScopeStack& stack, Scope* parent)
    : stack_(stack), previous_(stack.current_), scope_(std::make_unique<Scope>(parent)) {
  stack_.current_ = scope_.get();
}

ScopeStack::Entered::~Entered() {
  stack_.current_ = previous_;
  if (scope_->captured_) stack_.kept_.push_back(std::move(scope_));
}

Evaluator::Evaluator(const Template& source, Runtime& runtime, const Json& context)
    : template_(source), runtime_(runtime) {
  for (const std::string& name : source.symbols) {
    const auto given = context.find(name);
    globals_.push_back(given != context.end() ? runtime.from_json(*given)
                                              : find_global(runtime, name));
  }
}

std::string Evaluator::run() {
  TextBuilder output(runtime_.budget());
  output_ = &output;
  execute(template_.body);
  return output.take();
}

void Evaluator::write(std::string_view text) {
  const size_t limit = runtime_.budget().limits().max_output_bytes;
  if (text.size() > limit - std::min(limit, output_->view().size())) {
    render_fail("the text is longer than {} bytes", limit);
  }
  runtime_.budget().spend_bytes(text.size());
  output_->append(text);
}

Evaluator::Flow Evaluator::execute(const Body& body) {
  for (const Statement& statement : body) {
    const Flow flow = execute(statement);
    if (flow != Flow::next) return flow;
  }
  return Flow::next;
}

Evaluator::Flow Evaluator::execute(const Statement& statement) {
  const Budget::Level level(runtime_.budget());
  runtime_.budget().spend();
  line_ = statement.line;
  return std::visit([this](const auto& node) { return run_node(node); }, statement.node);
}

Evaluator::Flow Evaluator::run_body(const Body& body) {
  const ScopeStack::Entered scope(scopes_);
  return execute(body);
}

Value Evaluator::capture(const Body& body) {
  TextBuilder text(runtime_.budget());
  TextBuilder* outer = std::exchange(output_, &text);
  execute(body);
  output_ = outer;
  return runtime_.string(text.take());
}

Evaluator::Flow Evaluator::run_node(const Text& node) {
  write(node.text);
  return Flow::next;
}

Evaluator::Flow Evaluator::run_node(const Print& node) {
  const Value value = evaluate(*node.value);
  if (value.is_string()) {
    write(value.text());
  } else {
    write(to_str(runtime_.budget(), value));
  }
  return Flow::next;
}

void Evaluator::assign(const Target& target, const Value& value) {
  switch (target.kind) {
    case Target::Kind::name:
      scopes_.current().set(target.symbol, value);
      return;
    case Target::Kind::attribute: {
      const Value* holder = nullptr;
      for (const Scope* scope = &scopes_.current(); scope != nullptr && holder == nullptr;
           scope = scope->parent()) {
        holder = scope->find(target.symbol);
      }
      if (holder == nullptr) holder = &globals_[static_cast<size_t>(target.symbol)];
      if (!set_namespace_attribute(runtime_, *holder, target.attribute, value)) {
        render_fail("cannot set '{}' on '{}', which is no namespace", target.attribute,
                    holder->type_name());
      }
      return;
    }
    case Target::Kind::tuple: {
      const Items items = runtime_.iterate(value);
      if (items.size() != target.items.size()) {
        render_fail("cannot unpack {} values into {} names", items.size(), target.items.size());
      }
      for (size_t i = 0; i < target.items.size(); ++i) assign(target.items[i], items[i]);
      return;
    }
  }
}

Evaluator::Flow Evaluator::run_node(const Set& node) {
  assign(node.target, evaluate(*node.value));
  return Flow::next;
}

Value Evaluator::apply_filters(const std::vector<FilterCall>& filters, Value value) {
  for (const FilterCall& filter : filters) {
    line_ = filter.line;
    value = apply_filter(filter, value);
  }
  return value;
}

Evaluator::Flow Evaluator::run_node(const SetBlock& node) {
  Value value;
  {
    const ScopeStack::Entered scope(scopes_);
    value = apply_filters(node.filters, capture(node.body));
  }
  assign(node.target, value);
  return Flow::next;
}

Evaluator::Flow Evaluator::run_node(const If& node) {
  for (const auto& [test, body] : node.branches) {
    if (evaluate(*test).truth()) return execute(body);
  }
  return execute(node.otherwise);
}

Evaluator::Flow Evaluator::run_node(const For& node) {
  run_loop(node, &scopes_.current(), evaluate(*node.iterable), 0);
  return Flow::next;
}

void Evaluator::run_loop(const For& loop, Scope* scope, const Value& items, int depth0) {
  const Budget::Level level(runtime_.budget());
  auto state = std::make_shared<LoopState>(*this, loop, scope, runtime_.iterate(items), depth0);
  const Value loop_variable(std::static_pointer_cast<Object>(state));
  // As Jinja has it: `else` belongs to a loop none of whose rounds reached its end.
  bool completed = false;
  while (state->advance()) {
    runtime_.budget().spend(4);  // a scope costs more than an expression
    const ScopeStack::Entered entered(scopes_, scope);
    scopes_.current().set(template_.loop, loop_variable);
    assign(loop.target, state->current());
    const Flow flow = execute(loop.body);
    if (flow == Flow::break_loop) break;
    completed |= flow == Flow::next;
  }
  state->finish();
  if (!completed) {
    const ScopeStack::Entered entered(scopes_, scope);
    execute(loop.otherwise);
  }
}

Value Evaluator::recurse(const For& loop, Scope* scope, const Value& items, int depth0) {
  TextBuilder text(runtime_.budget());
  TextBuilder* outer = std::exchange(output_, &text);
  run_loop(loop, scope, items, depth0);
  output_ = outer;
  return runtime_.string(text.take());
}

bool Evaluator::passes(const For& loop, Scope* scope, const Value& item) {
  const ScopeStack::Entered entered(scopes_, scope);
  assign(loop.target, item);
  return evaluate(*loop.condition).truth();
}

Evaluator::Flow Evaluator::run_node(const LoopControl& node) {
  return node.is_break ? Flow::break_loop : Flow::continue_loop;
}

Value Evaluator::macro_value(const MacroCode& code) {
  return runtime_.object<MacroObject>(*this, code, &scopes_.capture(runtime_.budget()));
}

Evaluator::Flow Evaluator::run_node(const MacroDefinition& node) {
  scopes_.current().set(node.symbol, macro_value(node.code));
  return Flow::next;
}

Evaluator::Flow Evaluator::run_node(const CallBlock& node) {
  const Value caller = macro_value(node.caller);
  const Value result = call(std::get<Call>(node.call->node), &caller);
  write(to_str(runtime_.budget(), result));
  return Flow::next;
}

Evaluator::Flow Evaluator::run_node(const FilterBlock& node) {
  const ScopeStack::Entered scope(scopes_);
  write(to_str(runtime_.budget(), apply_filters(node.filters, capture(node.body))));
  return Flow::next;
}

Evaluator::Flow Evaluator::run_node(const With& node) {
  std::vector<Value> values;  // all of them are evaluated outside of the block
  for (const auto& binding : node.bindings) values.push_back(evaluate(*binding.second));
  const ScopeStack::Entered scope(scopes_);
  for (size_t i = 0; i < values.size(); ++i) assign(node.bindings[i].first, values[i]);
  return execute(node.body);
}

Evaluator::Flow Evaluator::run_node(const Scoped& node) { return run_body(node.body); }

Evaluator::Flow Evaluator::run_node(const Autoescape& node) {
  if (evaluate(*node.on).truth()) render_fail("only 'autoescape false' is available");
  return run_body(node.body);
}

Evaluator::Flow Evaluator::run_node(const Unavailable& node) { render_fail("{}", node.why); }

Value Evaluator::call_macro(const MacroCode& code, Scope* scope, const Arguments& arguments) {
  const ScopeStack::Entered entered(scopes_, scope);
  Scope& locals = scopes_.current();
  std::vector<std::pair<std::string, Value>> named = arguments.named;
  const auto take_named = [&named](const std::string& name) -> std::optional<Value> {
    for (auto it = named.begin(); it != named.end(); ++it) {
      if (it->first != name) continue;
      Value value = std::move(it->second);
      named.erase(it);
      return value;
    }
    return std::nullopt;
  };
  bool has_caller = false;
  for (size_t i = 0; i < code.parameters.size(); ++i) {
    const auto& [symbol, fallback] = code.parameters[i];
    const std::string& name = template_.symbols[static_cast<size_t>(symbol)];
    has_caller |= symbol == template_.caller;
    std::optional<Value> value;
    if (i < arguments.positional.size()) {
      value = arguments.positional[i];
    } else {
      value = take_named(name);
    }
    if (!value && fallback) value = evaluate(*fallback);
    locals.set(
        symbol,
        value ? *value : Value::undefined(fmt::format("parameter '{}' was not provided", name)));
  }
  if (code.uses_caller && !has_caller) {
    locals.set(template_.caller,
               take_named("caller").value_or(Value::undefined("no caller defined")));
  }
  if (code.uses_kwargs) {
    DictItems items;
    for (auto& [name, value] : named) items.emplace_back(runtime_.string(name), std::move(value));
    locals.set(template_.kwargs, runtime_.dict(std::move(items)));
  } else if (!named.empty()) {
    render_fail("macro '{}' takes no keyword argument '{}'", code.name, named.front().first);
  }
  const size_t bound = std::min(code.parameters.size(), arguments.positional.size());
  std::vector<Value> rest(arguments.positional.begin() + static_cast<std::ptrdiff_t>(bound),
                          arguments.positional.end());
  if (code.uses_varargs) {
    locals.set(template_.varargs, runtime_.sequence(std::move(rest), Sequence::Kind::tuple));
  } else if (!rest.empty()) {
    render_fail("macro '{}' takes not more than {} argument(s)", code.name, code.parameters.size());
  }
  return capture(code.body);
}

}  // namespace nanovllm::jinja
