#include "constrain/reasoning.h"

#include <algorithm>

namespace nanovllm {
namespace {

bool contains(const std::vector<int32_t>& ids, int32_t id) {
  return std::ranges::count(ids, id) > 0;
}

class ReasoningMatcher final : public TokenMatcher {
 public:
  // The Grammar, which the grammars (they may be null) and `reasoning` are parts of, outlives its
  // matchers.
  ReasoningMatcher(const Grammar* grammar, const Grammar* at_once, const Reasoning& reasoning)
      : grammar_(grammar), reasoning_(reasoning), is_opening_(!reasoning.begin.empty()) {
    begin_answer(is_opening_ ? at_once : grammar);
  }

  void fill_mask(std::span<uint32_t> mask) override {
    std::ranges::fill(mask, 0U);
    if ((ended_ || is_opening_) && answer_)
      answer_->fill_mask(mask);
    else if (is_forced())
      set(mask, reasoning_.end[matched_], true);
    else if (!is_opening_ || !grammar_)
      leave_free(mask);
    if (is_opening_) set(mask, reasoning_.begin[opened_], true);
  }

  bool accept(int32_t token) override {
    if (is_opening_) return open(token);
    if (ended_) return !answer_ || answer_->accept(token);
    if (is_forced() ? token != reasoning_.end[matched_]
                    : grammar_ && contains(reasoning_.eos, token))
      return false;
    ++generated_;
    advance(token);
    return true;
  }

 private:
  static void set(std::span<uint32_t> mask, int64_t id, bool value) {
    const uint32_t bit = 1U << (id % 32);
    uint32_t& word = mask[static_cast<size_t>(id / 32)];
    word = value ? word | bit : word & ~bit;
  }

  void leave_free(std::span<uint32_t> mask) const {
    for (int64_t id = 0; id < reasoning_.vocab_size; ++id) set(mask, id, true);
    for (const int32_t id : reasoning_.eos) set(mask, id, !grammar_);
  }

  void begin_answer(const Grammar* grammar) {
    if (grammar) answer_ = grammar->new_matcher();
  }

  // While the tokens may still be those of `begin`, they may be those of an answer without
  // reasoning, too, as long as the grammar takes them.
  bool open(int32_t token) {
    const bool may_be_answer = !grammar_ || (answer_ && answer_->accept(token));
    if (token == reasoning_.begin[opened_]) {
      if (!may_be_answer) answer_.reset();
      if (++opened_ < reasoning_.begin.size()) return true;
      is_opening_ = false;
      begin_answer(grammar_);
      return true;
    }
    is_opening_ = false;
    ended_ = true;
    return may_be_answer;
  }

  bool is_forced() const {
    return !ended_ && !is_opening_ && reasoning_.token_budget >= 0 &&
           generated_ >= reasoning_.token_budget;
  }

  // How much of `end` the last tokens are; a shorter beginning of it where the longer one breaks.
  void advance(int32_t token) {
    const std::vector<int32_t>& end = reasoning_.end;
    recent_.push_back(token);
    if (recent_.size() > end.size()) recent_.erase(recent_.begin());
    matched_ = std::min(recent_.size(), end.size());
    while (!std::equal(end.begin(), end.begin() + static_cast<std::ptrdiff_t>(matched_),
                       recent_.end() - static_cast<std::ptrdiff_t>(matched_)))
      --matched_;
    ended_ = matched_ == end.size();
  }

  const Grammar* const grammar_;
  const Reasoning& reasoning_;
  std::unique_ptr<TokenMatcher> answer_;  // null without a grammar, and where it takes no more
  bool is_opening_;                       // the tokens so far are a beginning of `begin`
  size_t opened_ = 0;                     // how many
  std::vector<int32_t> recent_;
  size_t matched_ = 0;  // tokens of `end` that the last ones are
  int64_t generated_ = 0;
  bool ended_ = false;
};

}  // namespace

std::unique_ptr<TokenMatcher> ReasoningGrammar::new_matcher() const {
  return std::make_unique<ReasoningMatcher>(grammar_.get(), at_once_.get(), reasoning_);
}

}  // namespace nanovllm
