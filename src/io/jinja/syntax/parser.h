// Recursive descent over the tokens, following the grammar of Jinja 3.1 (parser.py): the same
// precedence, the same quirks.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/check.h"
#include "io/jinja/syntax/ast.h"
#include "io/jinja/syntax/lexer.h"
#include "io/utf8.h"

namespace nanovllm::jinja {

class Parser {
 public:
  Parser(std::string_view source, std::string name);
  Template run();

 private:
  /// One level of nesting in the source, for as long as it lives.
  class Level {
   public:
    explicit Level(Parser& parser) : parser_(parser) {
      if (++parser.nesting_ > kMaxSourceNesting) {
        parser.syntax_error("blocks or brackets nest deeper than {} levels", kMaxSourceNesting);
      }
    }
    ~Level() { --parser_.nesting_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

   private:
    Parser& parser_;
  };

  // Tokens.
  const Token& current() const { return tokens_[at_]; }
  const Token& ahead() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  const Token& next() { return at_ + 1 < tokens_.size() ? tokens_[at_++] : tokens_[at_]; }
  bool skip_op(std::string_view op);
  bool skip_name(std::string_view name);
  void expect_op(std::string_view op);
  void expect_name(std::string_view name);
  void expect(Token::Kind kind);
  std::string identifier();
  template <class... Args>
  [[noreturn]] void syntax_error(fmt::format_string<Args...> format, Args&&... args) const {
    fail(ErrorKind::model, "{}:{}: {}", template_.name, current().line,
         one_line(fmt::format(format, std::forward<Args>(args)...)));
  }
  static std::string describe(const Token& token);

  Symbol symbol(const std::string& name);
  ExprPtr make(Expr::Node node, int line);

  // Statements (parser.cpp).
  Body parse_body(std::initializer_list<std::string_view> ends);
  Body parse_block_body(std::initializer_list<std::string_view> ends);
  Body parse_closed_body(std::string_view end);
  Statement parse_statement();
  Statement parse_set(int line);
  Statement parse_if(int line);
  Statement parse_for(int line);
  Statement parse_macro(int line);
  Statement parse_call_block(int line);
  Statement parse_with(int line);
  Statement parse_scoped(int line, std::string_view tag);
  void parse_signature(MacroCode& code);
  Body parse_macro_body(MacroCode& code, std::string_view end);
  Target parse_target(bool with_attribute, bool with_tuple = true);
  Target parse_single_target(bool with_attribute);
  std::vector<FilterCall> parse_filter_chain(bool first_is_bare);

  // Expressions (parse_expression.cpp).
  ExprPtr parse_expression(bool with_conditional = true);
  ExprPtr parse_tuple(bool with_conditional = true, bool in_parentheses = false,
                      std::string_view end_name = "");
  ExprPtr parse_conditional();
  ExprPtr parse_or();
  ExprPtr parse_and();
  ExprPtr parse_not();
  ExprPtr parse_compare();
  ExprPtr parse_sum();
  ExprPtr parse_concat();
  ExprPtr parse_product();
  ExprPtr parse_power();
  ExprPtr parse_unary(bool with_filter = true);
  ExprPtr parse_primary();
  ExprPtr parse_name_or_constant();
  ExprPtr parse_strings(int line);
  ExprPtr parse_list();
  ExprPtr parse_dict();
  ExprPtr parse_postfix(ExprPtr expr);
  ExprPtr parse_filters(ExprPtr expr);
  ExprPtr parse_dot(ExprPtr object);
  ExprPtr parse_subscript(ExprPtr object);
  ExprPtr parse_test(ExprPtr input);
  FilterCall parse_filter_call();
  ArgumentList parse_arguments();

  Template template_;
  std::vector<Token> tokens_;
  size_t at_ = 0;
  int nesting_ = 0;
  int loops_ = 0;  // `for` bodies around the current place, within the current macro
  std::unordered_map<std::string, Symbol> symbols_;
  std::vector<MacroCode*> macros_;  // the macros around the current place
};

}  // namespace nanovllm::jinja
