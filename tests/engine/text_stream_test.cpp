#include "engine/text_stream.h"

#include <algorithm>
#include <chrono>
#include <random>

#include <gtest/gtest.h>

#include "core/seconds.h"
#include "engine/byte_tokenizer.h"

namespace nanovllm {
namespace {

SamplingParams with_stops(std::vector<std::string> stops, bool include = false) {
  SamplingParams params;
  params.stop = std::move(stops);
  params.include_stop_str_in_output = include;
  return params;
}

std::string visible(const TextStream& stream) { return stream.text().substr(0, stream.visible()); }

TEST(TextStream, AStopStringMayEndSeveralTokensAfterItBegan) {
  const ByteTokenizer tokenizer({});
  const SamplingParams params = with_stops({"<end>"});
  TextStream stream(*tokenizer, params);
  for (const char c : std::string("ab<en")) EXPECT_FALSE(stream.add(c, true));
  EXPECT_EQ(visible(stream), "ab");
  EXPECT_FALSE(stream.add('!', true));
  EXPECT_EQ(visible(stream), "ab<en!");
  for (const char c : std::string("<end")) EXPECT_FALSE(stream.add(c, true));
  EXPECT_EQ(stream.add('>', true), "<end>");
  EXPECT_EQ(stream.text(), "ab<en!");
  EXPECT_EQ(visible(stream), "ab<en!");
}

TEST(TextStream, TheStopStringStaysWhereItWasAskedFor) {
  const ByteTokenizer tokenizer({"x.y"});
  const SamplingParams params = with_stops({"."}, true);
  TextStream stream(*tokenizer, params);
  EXPECT_EQ(stream.add(256, true), ".");
  EXPECT_EQ(stream.text(), "x.");
}

TEST(TextStream, OfSeveralStopStringsTheFirstInTheTextWins) {
  const ByteTokenizer tokenizer({"one two three"});
  for (const auto& stops : {std::vector<std::string>{"three", "two"}, {"two", "three"}}) {
    const SamplingParams params = with_stops(stops);
    TextStream stream(*tokenizer, params);
    EXPECT_EQ(stream.add(256, true), "two");
    EXPECT_EQ(stream.text(), "one ");
  }
}

TEST(TextStream, OfStopStringsThatBeginTogetherTheFirstInTheListWins) {
  const ByteTokenizer tokenizer({"x<<<"});
  const SamplingParams params = with_stops({"<<", "<<<", "<"}, true);
  TextStream stream(*tokenizer, params);
  EXPECT_EQ(stream.add(256, true), "<<");
  EXPECT_EQ(stream.text(), "x<<");
}

TEST(TextStream, ACharacterThatIsCutByTokensIsNeverShownInHalves) {
  const ByteTokenizer tokenizer({});
  const SamplingParams params = with_stops({"\xc3\xa9!"});  // e with acute accent
  TextStream stream(*tokenizer, params);
  EXPECT_FALSE(stream.add('a', true));
  EXPECT_FALSE(stream.add(0xc3, true));
  EXPECT_EQ(visible(stream), "a");
  EXPECT_FALSE(stream.add(0xa9, true));
  EXPECT_EQ(visible(stream), "a");  // may become the stop string
  EXPECT_EQ(stream.add('!', true), "\xc3\xa9!");
  EXPECT_EQ(stream.text(), "a");
}

TEST(TextStream, AnotherCharacterWithTheSameFirstByteIsNotAStopString) {
  const ByteTokenizer tokenizer({});
  const SamplingParams params = with_stops({"\xc3\xa9"});
  TextStream stream(*tokenizer, params);
  for (const int byte : {0xc3, 0xa8, 0x62}) EXPECT_FALSE(stream.add(byte, true));
  EXPECT_EQ(visible(stream),
            "\xc3\xa8"
            "b");
}

TEST(TextStream, NothingIsHeldBackAfterTheEnd) {
  const ByteTokenizer tokenizer({});
  const SamplingParams params = with_stops({"<end>"});
  TextStream stream(*tokenizer, params);
  for (const int byte : {0x61, 0x3c, 0x65, 0xe2, 0x82}) EXPECT_FALSE(stream.add(byte, true));
  stream.finish();
  EXPECT_EQ(visible(stream), "a<e\xef\xbf\xbd");  // half a character becomes U+FFFD
}

TEST(TextStream, WhatStandsBeforeMinTokensStopsNothingLater) {
  const ByteTokenizer tokenizer({});
  const SamplingParams params = with_stops({"a", "long stop"});
  TextStream stream(*tokenizer, params);
  EXPECT_FALSE(stream.add('a', false));
  EXPECT_EQ(visible(stream), "a");
  EXPECT_FALSE(stream.add('b', true)) << "the stop string ended before min_tokens";
  EXPECT_EQ(visible(stream), "ab");
  EXPECT_EQ(stream.add('a', true), "a");
  EXPECT_EQ(visible(stream), "ab");
}

// As many as a request may have, of 1,024 bytes, once cost the engine's thread 0.2 ms a token.
TEST(TextStream, LongStopStringsCostAboutWhatShortOnesDo) {
  const ByteTokenizer tokenizer({});
  const auto seconds = [&](size_t length) {
    const SamplingParams params =
        with_stops(std::vector<std::string>(64, std::string(length - 1, 'a') + 'b'));
    double least = 1e9;
    for (int i = 0; i < 5; ++i) {
      TextStream stream(*tokenizer, params);
      const auto begin = std::chrono::steady_clock::now();
      for (int k = 0; k < 5000; ++k) stream.add(k % 500 == 499 ? 'c' : 'a', true);
      least = std::min(least, to_seconds(std::chrono::steady_clock::now() - begin));
    }
    return least;
  };
  EXPECT_LT(seconds(1024), 10 * seconds(16));
}

// The promise of TextStream, from the whole text after every token.
struct Oracle {
  const SamplingParams& params;
  std::string text;
  bool stopped = false;

  std::optional<std::string> add(const std::string& piece, bool may_stop) {
    const size_t before = text.size();
    text += piece;
    for (size_t begin = 0; may_stop && begin < text.size(); ++begin)
      for (const std::string& stop : params.stop)
        if (text.compare(begin, stop.size(), stop) == 0 && begin + stop.size() > before) {
          text.resize(begin + (params.include_stop_str_in_output ? stop.size() : 0));
          stopped = true;
          return stop;
        }
    return std::nullopt;
  }
  size_t certain() const {
    if (stopped) return text.size();
    for (size_t begin = 0; begin < text.size(); ++begin)
      for (const std::string& stop : params.stop)
        if (text.size() - begin < stop.size() &&
            stop.compare(0, text.size() - begin, text, begin) == 0)
          return begin;
    return text.size();
  }
};

TEST(TextStream, AgreesWithTheWholeTextForEveryWayToCutItIntoTokens) {
  std::mt19937 random(7);
  const auto pick = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  const auto word = [&](int longest) {
    static const std::vector<std::string> letters = {"a", "b", "\xc3\xa9", "\xe2\x82\xac"};
    std::string text;
    for (int n = pick(1, longest); n > 0; --n)
      text += letters[static_cast<size_t>(pick(0, 3) == 0 ? pick(2, 3) : pick(0, 1))];
    return text;
  };
  int stopped = 0;
  for (int round = 0; round < 300; ++round) {
    std::vector<std::string> pieces;
    for (int i = 0; i < 6; ++i) pieces.push_back(word(4));
    std::sort(pieces.begin(), pieces.end());
    pieces.erase(std::unique(pieces.begin(), pieces.end()), pieces.end());
    std::erase_if(pieces, [](const std::string& piece) { return piece.size() == 1; });
    const ByteTokenizer tokenizer(pieces);
    for (int run = 0; run < 20; ++run) {
      std::vector<std::string> stops;
      for (int i = pick(0, 3); i > 0; --i) stops.push_back(word(5));
      const SamplingParams params = with_stops(stops, pick(0, 1) == 1);
      size_t longest = 1;
      for (const std::string& stop : stops) longest = std::max(longest, stop.size());
      TextStream stream(*tokenizer, params);
      Oracle oracle{params, {}};
      const int min_tokens = pick(0, 1) * pick(0, 6);
      std::string shown;
      for (int token = 1; token <= 12 && !oracle.stopped; ++token) {
        // Below 0: a single letter.
        const int piece = pick(-2, static_cast<int>(pieces.size()) - 1);
        const int32_t id = piece < 0 ? 'a' + piece + 2 : 256 + piece;
        const std::string text =
            piece < 0 ? std::string(1, static_cast<char>(id)) : pieces[static_cast<size_t>(piece)];
        const auto expected = oracle.add(text, token >= min_tokens);
        ASSERT_EQ(stream.add(id, token >= min_tokens), expected);
        ASSERT_EQ(stream.text(), oracle.text);
        ASSERT_EQ(stream.visible(), oracle.certain());
        ASSERT_LT(stream.text().size() - stream.visible(), longest);
        ASSERT_EQ(stream.text().compare(0, shown.size(), shown), 0)
            << "text that was shown was taken back";
        shown = visible(stream);
        stopped += oracle.stopped;
      }
    }
  }
  EXPECT_GT(stopped, 500);
}

}  // namespace
}  // namespace nanovllm
