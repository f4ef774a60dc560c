#include "io/tokenizer/patterns/pattern.h"

#include "core/check.h"
#include "io/tokenizer/patterns/class_pattern.h"
#include "io/tokenizer/patterns/pcre_pattern.h"

namespace nanovllm {
namespace {

class LiteralPattern final : public Pattern {
 public:
  explicit LiteralPattern(std::string_view literal) : literal_(literal) {}

  void find_all(std::string_view text, std::vector<Span>& matches, SearchBudget&) const override {
    size_t at = 0;
    while ((at = text.find(literal_, at)) != std::string_view::npos) {
      matches.push_back({at, at + literal_.size()});
      at += literal_.size();
    }
  }

 private:
  std::string literal_;
};

}  // namespace

void Pattern::refuse_work(std::string_view text) {
  fail(ErrorKind::invalid_argument,
       "the tokenizer's regular expressions take too many steps on this text (a piece of {} bytes)",
       text.size());
}

std::unique_ptr<Pattern> make_regex_pattern(std::string_view regex, const CategoryTable& categories,
                                            const std::string& where) {
  if (auto pattern = ClassPattern::parse(regex, categories)) return pattern;
  return std::make_unique<PcrePattern>(regex, where);
}

std::unique_ptr<Pattern> make_literal_pattern(std::string_view literal, const std::string& where) {
  check(!literal.empty(), ErrorKind::model, "{} is an empty string: it would match everywhere",
        where);
  return std::make_unique<LiteralPattern>(literal);
}

}  // namespace nanovllm
