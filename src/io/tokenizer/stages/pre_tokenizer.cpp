#include "io/tokenizer/stages/pre_tokenizer.h"

#include <utility>

#include "io/tokenizer/nesting.h"
#include "io/tokenizer/stages/replace.h"
#include "io/utf8.h"

namespace nanovllm {
namespace {

constexpr std::string_view kGpt2Regex =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
/// The characters that Rust's char::is_numeric takes: \p{N}, here with the numerals of Unicode 17.
constexpr std::string_view kDigit = "[\\p{N}\U00011DE0-\U00011DE9\U00016FF4-\U00016FF6]";

/// The reference library's punctuation: ASCII's, and \p{P} of an older Unicode, here
/// without what has come since.
constexpr std::string_view kPunctuation =
    "(?!["
    "\u061D\u09FD\u0A76\u0C77\u0C84\u1B4E-\u1B4F\u1B7D-\u1B7F\u2E43-\u2E4F\u2E52-\u2E5D"
    "\U00010D6E\U00010EAD\U00010F55-\U00010F59\U00010F86-\U00010F89\U000113D4-\U000113D5"
    "\U000113D7-\U000113D8\U0001144B-\U0001144F\U0001145A-\U0001145B\U0001145D"
    "\U00011660-\U0001166C\U000116B9\U0001183B\U00011944-\U00011946\U000119E2"
    "\U00011A3F-\U00011A46\U00011A9A-\U00011A9C\U00011A9E-\U00011AA2\U00011B00-\U00011B09"
    "\U00011BE1\U00011C41-\U00011C45\U00011C70-\U00011C71\U00011EF7-\U00011EF8"
    "\U00011F43-\U00011F4F\U00011FFF\U00012FF1-\U00012FF2\U00016D6D-\U00016D6F"
    "\U00016E97-\U00016E9A\U00016FE2\U0001E5FF\U0001E95E-\U0001E95F"
    "])[!-/:-@\\[-`{-~\\p{P}\u166D\U000111C9]";
/// The class `\w` of Rust's regular expressions.
constexpr std::string_view kWord =
    "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\u200C\u200D\u24B6-\u24E9\U0001F130-\U0001F149"
    "\U0001F150-\U0001F169\U0001F170-\U0001F189";

/// The fate of a Split's matches.
enum class Behavior { removed, isolated, merged_with_previous, merged_with_next, contiguous };

Behavior parse_behavior(const Entry& entry) {
  const std::string& name = entry.string("behavior");
  if (name == "Removed") return Behavior::removed;
  if (name == "Isolated") return Behavior::isolated;
  if (name == "MergedWithPrevious") return Behavior::merged_with_previous;
  if (name == "MergedWithNext") return Behavior::merged_with_next;
  if (name == "Contiguous") return Behavior::contiguous;
  fail(ErrorKind::model,
       "{}: \"{}\" is not one of Removed, Isolated, MergedWithPrevious, "
       "MergedWithNext, Contiguous",
       entry.place_of("behavior"), name);
}

class Split final : public PreTokenizer {
 public:
  Split(std::unique_ptr<Pattern> pattern, Behavior behavior, bool invert)
      : pattern_(std::move(pattern)), behavior_(behavior), invert_(invert) {}

  void apply(Pieces& pieces, SearchBudget& budget) const override {
    std::vector<Span> result;
    result.reserve(pieces.spans.size());
    std::vector<Span> matches;
    std::vector<Part> parts;
    for (const Span& span : pieces.spans) {
      matches.clear();
      pattern_->find_all(pieces.text.substr(span.begin, span.size()), matches, budget);
      parts.clear();
      cover(matches, span.size(), parts);
      for (const Part& part : parts)
        if (part.end > part.begin)
          result.push_back({span.begin + part.begin, span.begin + part.end});
    }
    pieces.spans = std::move(result);
  }

 private:
  struct Part {
    size_t begin, end;
    bool is_match;
  };

  /// Turns matches into parts that cover [0, size), joined as the behaviour says. Parts may be
  /// empty.
  void cover(const std::vector<Span>& matches, size_t size, std::vector<Part>& parts) const {
    bool after_match = false;
    const auto add = [&](size_t begin, size_t end, bool is_match) {
      is_match ^= invert_;
      if (joins(is_match, after_match, parts)) {
        parts.back().end = end;
      } else if (behavior_ != Behavior::removed || !is_match) {
        parts.push_back({begin, end, is_match});
      }
      after_match = is_match;
    };
    size_t at = 0;
    for (const Span& match : matches) {
      if (match.begin > at) add(at, match.begin, false);
      add(match.begin, match.end, true);
      at = match.end;
    }
    if (at < size) add(at, size, false);
    if (behavior_ == Behavior::merged_with_next) merge_with_next(parts);
  }

  bool joins(bool is_match, bool after_match, const std::vector<Part>& parts) const {
    if (parts.empty()) return false;
    if (behavior_ == Behavior::contiguous) return is_match == after_match;
    return behavior_ == Behavior::merged_with_previous && is_match && !after_match;
  }

  /// From the back: the last match of a run joins what follows it.
  static void merge_with_next(std::vector<Part>& parts) {
    for (size_t i = parts.size(); i-- > 1;) {
      if (!parts[i - 1].is_match || parts[i].is_match) continue;
      parts[i].begin = parts[i - 1].begin;
      parts[i - 1].end = parts[i - 1].begin;
    }
  }

  std::unique_ptr<Pattern> pattern_;
  Behavior behavior_;
  bool invert_;
};

/// Rewrites every piece: the text of the chain changes.
class Rewriter : public PreTokenizer {
 public:
  void apply(Pieces& pieces, SearchBudget&) const final {
    std::string out;
    out.reserve(pieces.text.size() + 16);
    for (Span& span : pieces.spans) {
      const size_t begin = out.size();
      rewrite(pieces.text.substr(span.begin, span.size()), pieces.starts_input && span.begin == 0,
              out);
      span = {begin, out.size()};
    }
    pieces.storage = std::move(out);
    pieces.text = pieces.storage;
  }

 private:
  virtual void rewrite(std::string_view piece, bool first, std::string& out) const = 0;
};

class PrefixSpace final : public Rewriter {
  void rewrite(std::string_view piece, bool, std::string& out) const override {
    if (!piece.starts_with(' ')) out += ' ';
    out += piece;
  }
};

class SpellBytes final : public Rewriter {
 public:
  explicit SpellBytes(const ByteAlphabet& alphabet) : alphabet_(alphabet) {}

 private:
  void rewrite(std::string_view piece, bool, std::string& out) const override {
    out += alphabet_.spell(piece);
  }
  const ByteAlphabet& alphabet_;
};

enum class PrependScheme { always, first, never };

class Metaspace final : public Rewriter {
 public:
  Metaspace(std::string replacement, PrependScheme scheme)
      : replacement_(std::move(replacement)), scheme_(scheme) {}

 private:
  void rewrite(std::string_view piece, bool first, std::string& out) const override {
    const bool starts = piece.starts_with(' ') || piece.starts_with(replacement_);
    if (!starts && (scheme_ == PrependScheme::always || (scheme_ == PrependScheme::first && first)))
      out += replacement_;
    for (const char c : piece) {
      if (c == ' ') {
        out += replacement_;
      } else {
        out += c;
      }
    }
  }
  std::string replacement_;
  PrependScheme scheme_;
};

class ChainBuilder {
 public:
  ChainBuilder(const CategoryTable& categories, const ByteAlphabet& alphabet)
      : categories_(categories), alphabet_(alphabet) {}

  void add(const Entry& entry, bool last) {
    const std::string& type = entry.type();
    if (type == "ByteLevel") return add_byte_level(entry, last);
    if (type == "Metaspace") return add_metaspace(entry);
    if (type == "Split") {
      auto pattern = make_pattern(entry, categories_);
      return push(std::make_unique<Split>(std::move(pattern), parse_behavior(entry),
                                          entry.flag("invert", false)));
    }
    if (type == "Digits")
      return push(split(kDigit, entry.flag("individual_digits", false) ? Behavior::isolated
                                                                       : Behavior::contiguous));
    if (type == "WhitespaceSplit") return push(split("\\s", Behavior::removed));
    if (type == "Whitespace")  // \w+|[^\w\s]+
      return push(
          split(fmt::format("[{0}]+|[^\\s{0}]+", kWord), Behavior::removed, /*invert=*/true));
    if (type == "Punctuation")
      return push(
          split(kPunctuation, entry.find("behavior") ? parse_behavior(entry) : Behavior::isolated));
    entry.refuse_type(
        "Sequence, ByteLevel, Split, Digits, Metaspace, Whitespace, WhitespaceSplit, Punctuation");
  }

  PreTokenizerChain take() { return std::move(chain_); }

 private:
  void push(std::unique_ptr<PreTokenizer> step) { chain_.steps.push_back(std::move(step)); }

  std::unique_ptr<Split> split(std::string_view regex, Behavior behavior,
                               bool invert = false) const {
    return std::make_unique<Split>(make_regex_pattern(regex, categories_, "a built-in pattern"),
                                   behavior, invert);
  }

  void add_byte_level(const Entry& entry, bool last) {
    if (entry.flag("add_prefix_space", true)) push(std::make_unique<PrefixSpace>());
    if (entry.flag("use_regex", true)) push(split(kGpt2Regex, Behavior::isolated));
    if (last) {
      chain_.byte_level = true;
    } else {
      push(std::make_unique<SpellBytes>(alphabet_));
    }
  }

  void add_metaspace(const Entry& entry) {
    const std::string& replacement = entry.string("replacement");
    check(!replacement.empty() && decode_utf8(replacement.data()).length == replacement.size(),
          ErrorKind::model, "{} must be one character", entry.place_of("replacement"));
    PrependScheme scheme = PrependScheme::always;
    if (const auto name = entry.member("prepend_scheme")) {
      if (name->string() == "first")
        scheme = PrependScheme::first;
      else if (name->string() == "never")
        scheme = PrependScheme::never;
      else
        check(name->string() == "always", ErrorKind::model,
              "{} is \"{}\": not one of always, first, never", name->place(), name->string());
    } else if (!entry.flag("add_prefix_space", true)) {  // before tokenizers 0.19
      scheme = PrependScheme::never;
    }
    push(std::make_unique<Metaspace>(replacement, scheme));
    if (entry.flag("split", true))
      push(std::make_unique<Split>(make_literal_pattern(replacement, entry.place()),
                                   Behavior::merged_with_next, false));
  }

  const CategoryTable& categories_;
  const ByteAlphabet& alphabet_;
  PreTokenizerChain chain_;
};

}  // namespace

PreTokenizerChain make_pre_tokenizers(const Entry& entry, const CategoryTable& categories,
                                      const ByteAlphabet& alphabet) {
  std::vector<Entry> entries;
  flatten_sequence(entry, "pretokenizers", entries);
  ChainBuilder builder(categories, alphabet);
  for (size_t i = 0; i < entries.size(); ++i) builder.add(entries[i], i + 1 == entries.size());
  return builder.take();
}

}  // namespace nanovllm
