#include "chat/chat_parser.h"

#include <optional>

#include "chat/reasoning.h"
#include "chat/tool_calls.h"

namespace nanovllm {

void ChatDelta::add(const ChatDelta& more) {
  reasoning += more.reasoning;
  content += more.content;
  tool_calls.insert(tool_calls.end(), more.tool_calls.begin(), more.tool_calls.end());
}

void ChatMessage::add(const ChatDelta& delta) {
  reasoning += delta.reasoning;
  content += delta.content;
  for (const ToolCallDelta& news : delta.tool_calls) {
    if (!news.name.empty()) tool_calls.push_back({news.id, news.name, ""});
    tool_calls[news.index].arguments += news.arguments;
  }
}

ChatDelta ChatMessage::delta() const {
  ChatDelta all{.reasoning = reasoning, .content = content};
  for (const ToolCall& call : tool_calls)
    all.tool_calls.push_back({.index = all.tool_calls.size(),
                              .id = call.id,
                              .name = call.name,
                              .arguments = call.arguments});
  return all;
}

class ChatParser::State {
 public:
  State(const ChatFormat& format, ChatParserOptions options)
      : options_(std::move(options)),
        splitter_(format.reasoning, options_.is_reasoning, options_.is_within) {
    if (format.tools && !options_.tools.empty()) calls_.emplace(*format.tools, options_);
  }

  ChatDelta add(std::string_view text) {
    ChatDelta delta;
    std::string content;
    splitter_.add(text, delta.reasoning, calls_ ? content : delta.content);
    if (calls_) calls_->add(content, delta);
    return delta;
  }

  ChatDelta finish() {
    ChatDelta delta;
    std::string content;
    splitter_.finish(delta.reasoning, calls_ ? content : delta.content);
    if (calls_) {
      calls_->add(content, delta);
      calls_->finish(delta);
    }
    return delta;
  }

  size_t num_calls() const { return calls_ ? calls_->num_calls() : 0; }

 private:
  const ChatParserOptions options_;
  ReasoningSplitter splitter_;
  std::optional<ToolCallParser> calls_;
};

ChatParser::ChatParser(const ChatFormat& format, ChatParserOptions options)
    : state_(std::make_unique<State>(format, std::move(options))) {}
ChatParser::~ChatParser() = default;
ChatParser::ChatParser(ChatParser&&) noexcept = default;
ChatParser& ChatParser::operator=(ChatParser&&) noexcept = default;

ChatDelta ChatParser::add(std::string_view text) { return state_->add(text); }
ChatDelta ChatParser::finish() { return state_->finish(); }
size_t ChatParser::num_calls() const { return state_->num_calls(); }

}  // namespace nanovllm
