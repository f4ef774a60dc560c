// Answers taken apart, however they are cut.
#pragma once

#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "chat/chat_parser.h"

namespace nanovllm {

inline bool operator==(const ToolCall& a, const ToolCall& b) {
  return a.id == b.id && a.name == b.name && a.arguments == b.arguments;
}

/// The message that comes of `pieces`. Checks what a client relies on: a call begins with its id
/// and name, in order of the indices, and only then come its arguments.
inline ChatMessage parse(const ChatFormat& format, const ChatParserOptions& options,
                         const std::vector<std::string_view>& pieces) {
  ChatParser parser(format, options);
  ChatMessage message;
  const auto take = [&](const ChatDelta& delta) {
    size_t calls = message.tool_calls.size();
    for (const ToolCallDelta& news : delta.tool_calls) {
      if (news.name.empty()) {
        EXPECT_EQ(news.index, calls - 1);
        EXPECT_TRUE(news.id.empty() && !news.arguments.empty());
      } else {
        EXPECT_EQ(news.index, calls++);
        EXPECT_TRUE(!news.id.empty() && news.arguments.empty());
      }
    }
    message.add(delta);
  };
  for (const std::string_view piece : pieces) take(parser.add(piece));
  take(parser.finish());
  EXPECT_EQ(parser.num_calls(), message.tool_calls.size());
  return message;
}

/// The message of the whole text, after a check that every cut of it in two, and the text byte by
/// byte, give the same; and complete calls the same as calls that come in pieces, where all of
/// them parse.
inline ChatMessage parse_everywhere(const ChatFormat& format, ChatParserOptions options,
                                    const std::string& text) {
  const std::string_view view = text;
  std::vector<ChatMessage> messages;
  for (const bool whole_calls : {true, false}) {
    options.whole_calls = whole_calls;
    const ChatMessage expected = parse(format, options, {view});
    const auto compare = [&](const ChatMessage& found) {
      EXPECT_EQ(found.reasoning, expected.reasoning);
      EXPECT_EQ(found.content, expected.content);
      EXPECT_EQ(found.tool_calls, expected.tool_calls);
      return !testing::Test::HasFailure();
    };
    for (size_t cut = 0; cut <= view.size(); ++cut)
      if (!compare(parse(format, options, {view.substr(0, cut), view.substr(cut)}))) {
        ADD_FAILURE() << "cut at " << cut << " of " << text;
        return expected;
      }
    std::vector<std::string_view> bytes;
    for (size_t i = 0; i < view.size(); ++i) bytes.push_back(view.substr(i, 1));
    compare(parse(format, options, bytes));
    messages.push_back(expected);
  }
  return messages.front();
}

inline ChatFormat format_named(const std::string& tools, const std::string& reasoning = "none") {
  return choose_chat_format("", tools, reasoning);
}

inline std::vector<Tool> tools_named(std::initializer_list<const char*> names) {
  std::vector<Tool> tools;
  for (const char* name : names) tools.push_back({.name = name});
  return tools;
}

/// Random values of JSON.
class RandomJson {
 public:
  explicit RandomJson(uint64_t seed) : random_(seed) {}

  size_t below(size_t n) { return random_() % n; }
  std::string text() {
    static const std::vector<std::string> kPieces = {"a",
                                                     "Zürich",
                                                     "東京",
                                                     "🌦",
                                                     "\"",
                                                     "'",
                                                     "\\",
                                                     "\n",
                                                     "\t",
                                                     " ",
                                                     "{",
                                                     "}",
                                                     "[",
                                                     "]",
                                                     ",",
                                                     ":",
                                                     "</tool_call>",
                                                     "<b>",
                                                     "1.5",
                                                     "null",
                                                     "\\n",
                                                     "\\u00e9",
                                                     ");",
                                                     "it's",
                                                     "\x01",
                                                     "%",
                                                     "=",
                                                     "<|x|>",
                                                     "[ARGS]",
                                                     "¡",
                                                     "true",
                                                     "arguments"};
    std::string text;
    for (size_t n = below(6); n > 0; --n) text += kPieces[below(kPieces.size())];
    return text;
  }
  Json value(const std::string& type, int depth = 0) {
    if (type == "string") return text();
    if (type == "integer") return static_cast<int64_t>(random_()) >> below(64);
    if (type == "number")
      return std::ldexp(static_cast<double>(random_() % 1000000) + 0.5,
                        static_cast<int>(below(80)) - 40);
    if (type == "boolean") return below(2) == 0;
    if (type == "null") return nullptr;
    Json json = type == "array" ? Json::array() : Json::object();
    for (size_t n = below(4); n > 0; --n) {
      const Json member = value(any_type(depth), depth + 1);
      if (type == "array")
        json.push_back(member);
      else
        json[text()] = member;
    }
    return json;
  }
  std::string any_type(int depth = 0) {
    static const char* kTypes[] = {"string", "integer", "number", "boolean",
                                   "null",   "array",   "object"};
    return kTypes[below(depth > 2 ? 5 : 7)];
  }

 private:
  std::mt19937_64 random_;
};

}  // namespace nanovllm
