#include "constrain/reasoning.h"

#include <algorithm>

namespace nanovllm {
namespace {

bool contains(const std::vector<int32_t>& ids, int32_t id) {
  return std::ranges::count(ids, id) > 0;
}

class ReasoningMatcher final : public TokenMatcher {
 public:
  // The Grammar, which `reasoning` is a part of, outlives its matchers.
  ReasoningMatcher(std::unique_ptr<TokenMatcher> answer, const Reasoning& reasoning)
      : answer_(std::move(answer)), reasoning_(reasoning) {}

  void fill_mask(std::span<uint32_t> mask) override {
    if (ended_ && answer_) return answer_->fill_mask(mask);
    std::ranges::fill(mask, 0U);
    const auto set = [&](int64_t id, bool value) {
      const uint32_t bit = 1U << (id % 32);
      uint32_t& word = mask[static_cast<size_t>(id / 32)];
      word = value ? word | bit : word & ~bit;
    };
    if (is_forced()) return set(reasoning_.end[matched_], true);
    for (int64_t id = 0; id < reasoning_.vocab_size; ++id) set(id, true);
    for (const int32_t id : reasoning_.eos) set(id, !answer_);
  }

  bool accept(int32_t token) override {
    if (ended_) return !answer_ || answer_->accept(token);
    if (is_forced() ? token != reasoning_.end[matched_]
                    : answer_ && contains(reasoning_.eos, token))
      return false;
    ++generated_;
    advance(token);
    return true;
  }

 private:
  bool is_forced() const {
    return !ended_ && reasoning_.token_budget >= 0 && generated_ >= reasoning_.token_budget;
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

  std::unique_ptr<TokenMatcher> answer_;
  const Reasoning& reasoning_;
  std::vector<int32_t> recent_;
  size_t matched_ = 0;  // tokens of `end` that the last ones are
  int64_t generated_ = 0;
  bool ended_ = false;
};

}  // namespace

std::unique_ptr<TokenMatcher> ReasoningGrammar::new_matcher() const {
  return std::make_unique<ReasoningMatcher>(grammar_ ? grammar_->new_matcher() : nullptr,
                                            reasoning_);
}

}  // namespace nanovllm
