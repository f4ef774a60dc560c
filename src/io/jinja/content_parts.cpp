#include <optional>
#include <string>

#include "core/check.h"
#include "io/jinja/chat_template.h"

namespace nanovllm {
namespace {

/// Whether the template walks through the parts of a content. Others leave a list out, print it as
/// Python would, or fail; what one does is seen by trying it.
bool walks_parts(const ChatTemplate& chat_template, const Json& special_tokens) {
  constexpr const char* kText = "nanovllm content part";
  ChatRequest request;
  request.special_tokens = special_tokens;
  const Json part = {{"type", "text"}, {"text", kText}};
  const Json message = {{"role", "user"}, {"content", Json::array({part})}};
  request.messages = Json::array({message});
  try {
    const std::string text = chat_template.render(chat_context(request));
    const size_t at = text.find(kText);
    const bool is_printed =
        at > 0 && at != text.npos && (text[at - 1] == '\'' || text[at - 1] == '"');
    return at != text.npos && !is_printed;
  } catch (const Error&) {
    return false;
  }
}

/// The parts' texts, one below the other.
std::string joined_text(const Json& parts, size_t message) {
  std::string text;
  for (size_t i = 0; i < parts.size(); ++i) {
    const Json& part = parts[i];
    const bool is_text = part.is_object() && part.contains("type") && part["type"] == "text" &&
                         part.contains("text") && part["text"].is_string();
    check(
        is_text, ErrorKind::invalid_argument,
        R"(messages[{}].content[{}]: must be {{"type": "text", "text": ...}}: this engine takes text alone)",
        message, i);
    text += (i == 0 ? "" : "\n") + part["text"].get_ref<const std::string&>();
  }
  return text;
}

}  // namespace

void take_text_parts(const ChatTemplate& chat_template, ChatRequest& request) {
  if (!request.messages.is_array()) return;  // chat_context() refuses it
  std::optional<bool> as_parts;
  for (size_t i = 0; i < request.messages.size(); ++i) {
    Json& message = request.messages[i];
    if (!message.is_object() || !message.contains("content") || !message["content"].is_array())
      continue;
    std::string text = joined_text(message["content"], i);
    if (!as_parts) as_parts = walks_parts(chat_template, request.special_tokens);
    if (!*as_parts) message["content"] = std::move(text);
  }
}

}  // namespace nanovllm
