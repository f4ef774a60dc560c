// Grammars that need no module.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "constrain/grammar.h"

namespace nanovllm {

/// Makes matchers by a function.
class TestGrammar final : public Grammar {
 public:
  using Make = std::function<std::unique_ptr<TokenMatcher>()>;
  explicit TestGrammar(Make make) : make_(std::move(make)) {}
  std::unique_ptr<TokenMatcher> new_matcher() const override { return make_(); }

 private:
  Make make_;
};

/// Allows one of several texts, each a list of tokens, and `eos` after it.
class ChoiceMatcher : public TokenMatcher {
 public:
  ChoiceMatcher(std::vector<std::vector<int32_t>> choices, int32_t eos)
      : choices_(std::move(choices)) {
    for (auto& choice : choices_) choice.push_back(eos);
  }
  void fill_mask(std::span<uint32_t> mask) override {
    std::ranges::fill(mask, 0u);
    for (const auto& choice : choices_) {
      const auto id = static_cast<uint32_t>(choice[length_]);
      mask[id / 32] |= 1u << id % 32;
    }
  }
  bool accept(int32_t token) override {
    std::vector<std::vector<int32_t>> left;
    for (const auto& choice : choices_)
      if (choice[length_] == token) left.push_back(choice);
    if (left.empty()) return false;
    choices_ = std::move(left);
    ++length_;
    return true;
  }

 private:
  std::vector<std::vector<int32_t>> choices_;
  size_t length_ = 0;
};

/// Allows, after each text, some tokens out of `vocab_size` that are drawn from all of the text:
/// any mistake about what was generated shows. After some length, only `eos` is left (below 0: such
/// a text has no end).
class HashMatcher final : public TokenMatcher {
 public:
  HashMatcher(uint64_t seed, int64_t vocab_size, int32_t eos)
      : state_(mix(seed)),
        vocab_size_(static_cast<uint64_t>(vocab_size)),
        longest_(eos < 0 ? ~uint64_t{0} : 10 + mix(seed + 1) % 150),
        sparsity_(mix(seed + 2) % 8),
        eos_(static_cast<uint64_t>(eos)) {}
  void fill_mask(std::span<uint32_t> mask) override {
    EXPECT_FALSE(has_ended_) << "a mask after the end";
    for (uint64_t i = 0; i < mask.size(); ++i) mask[i] = word(i);
  }
  bool accept(int32_t token) override {
    const auto id = static_cast<uint64_t>(token);
    if (token < 0 || id >= vocab_size_ || (word(id / 32) >> id % 32 & 1) == 0) return false;
    state_ = mix(state_ ^ id);
    has_ended_ = id == eos_;
    ++length_;
    return true;
  }

 private:
  static uint64_t mix(uint64_t x) {  // splitmix64
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
  }
  uint32_t word(uint64_t i) const {
    const auto one = [i](uint64_t id) { return id / 32 == i ? 1u << id % 32 : 0u; };
    if (length_ >= longest_) return one(eos_);
    uint32_t bits = ~0u;
    for (uint64_t k = 0; k <= sparsity_; ++k)
      bits &= static_cast<uint32_t>(mix(state_ + (i << 8) + k));
    if (32 * i + 32 > vocab_size_) bits &= (1u << vocab_size_ % 32) - 1;
    return bits | one(state_ % vocab_size_);
  }

  uint64_t state_, vocab_size_, longest_, sparsity_, eos_, length_ = 0;
  bool has_ended_ = false;
};

inline std::shared_ptr<const Grammar> hash_grammar(uint64_t seed, int64_t vocab_size, int32_t eos) {
  return std::make_shared<TestGrammar>(
      [=] { return std::make_unique<HashMatcher>(seed, vocab_size, eos); });
}

}  // namespace nanovllm
