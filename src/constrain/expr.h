// Context-free grammars as trees, before they become the text that XGrammar reads. Schemas, regular
// expressions and choices are all made of these.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace nanovllm {

/// A set of Unicode characters. Surrogates are never in one.
class CharSet {
 public:
  struct Range {
    char32_t first, last;
  };

  CharSet() = default;
  CharSet(std::initializer_list<Range> ranges);
  static CharSet any();
  void add(char32_t first, char32_t last);
  void add(const CharSet& other);
  CharSet complement() const;
  CharSet without(const CharSet& other) const;
  bool contains(char32_t c) const;
  /// Sorted, without overlaps.
  const std::vector<Range>& ranges() const { return ranges_; }

 private:
  std::vector<Range> ranges_;
};

constexpr int64_t kUnbounded = -1;

/// An expression of a grammar. A choice of nothing matches no text, a sequence of nothing the empty
/// one.
struct Expr {
  enum class Kind { text, set, rule, sequence, choice, repeat, begin, end };
  Kind kind = Kind::sequence;
  std::string text{};         // UTF-8
  CharSet set{};              // one character of it
  int rule = 0;               // index into Rules
  std::vector<Expr> parts{};  // of sequence and choice; the one of repeat
  int64_t min = 0, max = 0;   // of repeat; max may be kUnbounded

  bool is_never() const { return kind == Kind::choice && parts.empty(); }
  bool is_empty() const { return kind == Kind::sequence && parts.empty(); }
};

Expr text(std::string_view bytes);
Expr one_of(CharSet set);
Expr rule(int index);
Expr sequence(std::vector<Expr> parts);
Expr choice(std::vector<Expr> parts);
Expr repeat(Expr part, int64_t min, int64_t max);
Expr optional(Expr part);
Expr never();

/// How many characters a text of an expression without rules has. `most` may be kUnbounded.
struct TextLengths {
  int64_t least = 0, most = 0;
};
TextLengths text_lengths(const Expr& e);

/// A grammar; the first rule is where it begins.
class Rules {
 public:
  /// A rule whose body comes later.
  int reserve();
  int add(Expr body);
  void define(int index, Expr body);
  size_t size() const { return bodies_.size(); }

  /// Drops what can never end: branches that lead only to themselves, or to a choice of nothing.
  /// False where nothing is left.
  bool prune();
  /// XGrammar's EBNF, from the rule `root` on. Only rules that `root` reaches.
  std::string to_ebnf() const;

 private:
  std::vector<Expr> bodies_;
};

}  // namespace nanovllm
