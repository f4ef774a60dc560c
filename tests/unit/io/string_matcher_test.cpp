#include "io/tokenizer/patterns/string_matcher.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

namespace nanovllm {
namespace {

// Every text of six characters over the strings' alphabet, beside what std::string_view finds.
TEST(StringMatcher, FindsTheFirstAndLongestStringFromAnyPlaceOn) {
  const std::vector<std::string_view> strings{"<|a|>", "<|a", "|a", "a|", "<"};
  const StringMatcher matcher(strings);
  constexpr std::string_view kAlphabet = "<|a>x";
  for (int number = 0; number < 5 * 5 * 5 * 5 * 5 * 5; ++number) {
    std::string text;
    for (int i = 0, rest = number; i < 6; ++i, rest /= 5)
      text += kAlphabet[static_cast<size_t>(rest % 5)];
    for (size_t from = 0; from <= text.size(); ++from) {
      size_t begin = text.npos, size = 0;
      for (const std::string_view string : strings) {
        const size_t at = text.find(string, from);
        if (at == text.npos || at > begin || (at == begin && string.size() < size)) continue;
        begin = at, size = string.size();
      }
      const auto match = matcher.find(text, from);
      ASSERT_EQ(match.has_value(), begin != text.npos) << text << " from " << from;
      if (!match) continue;
      ASSERT_EQ(match->span.begin, begin) << text << " from " << from;
      ASSERT_EQ(match->span.size(), size) << text << " from " << from;
    }
    std::vector<size_t> whole, cut;
    for (size_t at = 0; at < text.size(); ++at) {
      const std::string_view rest = std::string_view(text).substr(at);
      bool is_cut = false;
      for (const std::string_view string : strings) {
        if (rest.starts_with(string)) whole.push_back(at);
        is_cut |= string.starts_with(rest);
      }
      if (is_cut) cut.push_back(at);
    }
    auto found = matcher.find_beginnings(text);
    std::ranges::sort(found.whole);
    ASSERT_EQ(found.whole, whole) << text;
    ASSERT_EQ(found.cut, cut) << text;
  }
}

}  // namespace
}  // namespace nanovllm
