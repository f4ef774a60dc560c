// Any text as an answer, in any family's parser: whole calls parse, the text byte by byte and the
// whole text give the same, and without a call nothing but white space is lost.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "chat/chat_parser.h"

namespace {

using namespace nanovllm;

void require(bool condition) {
  if (!condition) std::abort();
}

ChatMessage parse(const ChatFormat& format, const ChatParserOptions& options, std::string_view text,
                  size_t piece) {
  ChatParser parser(format, options);
  ChatMessage message;
  for (; !text.empty(); text.remove_prefix(std::min(piece, text.size())))
    message.add(parser.add(text.substr(0, piece)));
  message.add(parser.finish());
  return message;
}

std::string without_space(std::string text) {
  std::erase_if(text, [](char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; });
  return text;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2 || size > 4096) return 0;
  const auto tool_names = tool_call_parser_names(), reasoning_names = reasoning_parser_names();
  const ChatFormat format =
      choose_chat_format("", tool_names[data[0] % tool_names.size()],
                         reasoning_names[data[1] / 4 % reasoning_names.size()]);
  const std::string_view text(reinterpret_cast<const char*>(data + 2), size - 2);
  ChatParserOptions options;
  options.is_reasoning = format.reasoning && data[1] % 2 == 1;
  options.whole_calls = data[1] / 2 % 2 == 1;
  options.tools = {
      {.name = "f",
       .parameters = R"({"properties": {"a": {"type": ["integer", "null"]}, "b": {}}})"}};
  const ChatMessage whole = parse(format, options, text, text.size());
  const ChatMessage bytes = parse(format, options, text, 1);
  require(whole.reasoning == bytes.reasoning && whole.content == bytes.content);
  require(whole.tool_calls.size() == bytes.tool_calls.size());
  for (size_t i = 0; i < whole.tool_calls.size(); ++i) {
    require(whole.tool_calls[i].arguments == bytes.tool_calls[i].arguments);
    // Numbers beyond a double's range are JSON all the same.
    if (options.whole_calls) require(whole.tool_calls[i].arguments.starts_with('{'));
  }
  if (whole.tool_calls.empty() && !format.reasoning)
    require(without_space(whole.content) == without_space(std::string(text)));
  return 0;
}
