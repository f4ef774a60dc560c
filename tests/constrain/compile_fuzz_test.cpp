// Mutated schemas, regular expressions, grammars and structural tags through the guards, the helper
// process and the masks: each is refused by an error of its own or makes masks, and none ends this
// process or takes longer than its limits.
//
// NANOVLLM_COMPILE_FUZZ=N takes N of them, and a line at the end says what became of them.
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>

#include <nlohmann/json.hpp>

#include "constrain/rig.h"
#include "io/json.h"

namespace nanovllm {
namespace {

std::vector<std::string> seeds() {
  std::vector<std::string> texts;
  const std::string source = NANOVLLM_SOURCE_DIR;
  for (const auto& file :
       std::filesystem::directory_iterator(source + "/tests/fuzz/corpus/structured_outputs")) {
    std::ifstream in(file.path(), std::ios::binary);
    texts.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }
  std::ranges::sort(texts);
  std::ifstream in(source + "/tests/data/schemas/programs.jsonl");
  for (std::string line; std::getline(in, line);)
    texts.push_back("j" + Json::parse(line)["schema"].dump());
  return texts;
}

class Mutator {
 public:
  size_t below(size_t n) { return random_() % n; }
  /// A seed with a few of its parts moved, doubled, cut out or changed; its first letter stays.
  std::string mutated(const std::vector<std::string>& seeds) {
    std::string text = seeds[below(seeds.size())];
    for (size_t n = below(4); n > 0 && text.size() > 2; --n) {
      const size_t at = 1 + below(text.size() - 1), length = 1 + below(below(2) ? 4 : 40);
      const std::string part = text.substr(at, length);
      switch (below(5)) {
        case 0:
          text.erase(at, length);
          break;
        case 1:
          text.insert(1 + below(text.size()), part);
          break;
        case 2:
          for (size_t k = below(8); k > 0; --k) text.insert(at, part);
          break;
        case 3:
          text[at] = "{}[]()\"|*+?,:019 \\ax"[below(21)];
          break;
        default: {
          const std::string& other = seeds[below(seeds.size())];
          text.replace(at, length, other.substr(1 + below(other.size() - 1), length));
        }
      }
    }
    return text;
  }

 private:
  std::mt19937 random_{23};
};

StructuredOutputs asked_for(const std::string& text) {
  StructuredOutputs asked;
  (text[0] == 'j'   ? asked.json
   : text[0] == 'r' ? asked.regex
   : text[0] == 'g' ? asked.grammar
                    : asked.structural_tag) = text.substr(1);
  return asked;
}

/// Draws some tokens along the masks.
void draw(const Grammar& grammar, Mutator& random) {
  const auto matcher = grammar.new_matcher();
  std::vector<uint32_t> mask((GrammarRig::kVocabSize + 31) / 32);
  for (int i = 0; i < 40; ++i) {
    matcher->fill_mask(mask);
    std::vector<int32_t> allowed;
    for (int32_t id = 0; id < GrammarRig::kVocabSize; ++id)
      if (mask[static_cast<size_t>(id / 32)] >> (id % 32) & 1U) allowed.push_back(id);
    ASSERT_FALSE(allowed.empty());
    const int32_t token = allowed[random.below(allowed.size())];
    EXPECT_TRUE(matcher->accept(token));
    if (token == GrammarRig::kEos) break;
  }
}

/// The fate of one, by the error's words that say so.
std::string outcome_of(const std::string& error) {
  for (const char* part : {"ended its process", "no token of this model", "kMax"}) {
    const size_t at = error.find(part);
    if (at != error.npos) return error.substr(at, error.find_first_of(",:;(", at) - at);
  }
  return "refused";
}

TEST(CompileFuzz, WhateverComesIsRefusedOrMakesMasks) {
  GrammarRig rig;
  if (!rig.has_module()) GTEST_SKIP() << "without the grammar module";
  const char* wanted = std::getenv("NANOVLLM_COMPILE_FUZZ");
  const std::vector<std::string> texts = seeds();
  Mutator random;
  std::map<std::string, int> outcomes;
  double longest = 0;
  for (int n = wanted ? std::atoi(wanted) : 50; n > 0; --n) {
    const std::string text = random.mutated(texts);
    if (text[0] == 'c') continue;  // choices have no syntax
    SCOPED_TRACE(text);
    if (wanted) std::ofstream("compile_fuzz_last") << text;  // for an end that no test survives
    const auto begin = std::chrono::steady_clock::now();
    std::string outcome = "made masks";
    try {
      const auto grammar = rig.compile(asked_for(text));
      draw(*grammar, random);
    } catch (const Error& error) {
      outcome = outcome_of(error.what());
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    }
    ++outcomes[outcome];
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    if (took.count() > 2 && wanted)
      std::printf("%.1f s: %s: %s\n", took.count(), outcome.c_str(), text.c_str());
    longest = std::max(longest, took.count());
  }
  for (const auto& [outcome, count] : outcomes) std::printf("%6d %s\n", count, outcome.c_str());
  std::printf("the longest took %.2f s\n", longest);
  EXPECT_GT(outcomes["made masks"], 0);
  EXPECT_GT(outcomes["refused"], 0);
}

}  // namespace
}  // namespace nanovllm
