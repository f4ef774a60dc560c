#include "api/chat_prompts.h"

#include "nanovllm/tokenizer.h"

#include "core/check.h"
#include "io/tokenizer/control_tokens.h"

namespace nanovllm {

ChatPrompts::ChatPrompts(const Tokenizer* tokenizer, bool parse_special)
    : tokenizer_(tokenizer), parse_special_(parse_special) {
  if (!tokenizer || tokenizer->chat_template().empty()) {
    no_chat_ = tokenizer ? fmt::format("{} is missing or empty", tokenizer->chat_template_place())
                         : "the tokenizer, which has it, was not loaded";
    return;
  }
  try {
    parse(tokenizer->chat_template(), tokenizer->chat_template_place(), tokenizer->tool_template());
  } catch (const Error& error) {
    no_chat_ = error.what();
  }
}

ChatPrompts::ChatPrompts(const Tokenizer* tokenizer, bool parse_special, const std::string& source,
                         const std::string& place)
    : tokenizer_(tokenizer), parse_special_(parse_special) {
  check(tokenizer != nullptr, ErrorKind::invalid_argument,
        "{} needs the tokenizer: drop skip_tokenizer_init", place);
  check(!source.empty(), ErrorKind::invalid_argument, "{} is empty", place);
  parse(source, place, "");
}

void ChatPrompts::parse(const std::string& source, const std::string& place,
                        const std::string& tools) {
  FindControlText find;
  if (!parse_special_)
    find = [tokens = std::make_shared<const ControlTokens>(*tokenizer_)](std::string_view text) {
      return tokens->find(text);
    };
  renderer_.emplace(source, place, std::move(find), local_time_now, tools);
}

Prompt ChatPrompts::prompt(Json messages, Json options) const {
  check(renderer_.has_value(), ErrorKind::invalid_argument,
        "messages need a chat template: {}; give a prompt instead", no_chat_);
  ChatRequest request;
  request.messages = std::move(messages);
  request.kwargs = std::move(options);
  check(request.kwargs.is_object(), ErrorKind::invalid_argument,
        "chat template options must be a JSON object");
  check(!request.kwargs.contains("messages"), ErrorKind::invalid_argument,
        "chat template options must not have messages: they are given apart");
  const auto take = [&](const char* name, Json& into) {
    if (!request.kwargs.contains(name)) return;
    into = request.kwargs[name];
    request.kwargs.erase(name);
  };
  const auto take_flag = [&](const char* name, bool otherwise) {
    Json flag = otherwise;
    take(name, flag);
    check(flag.is_boolean(), ErrorKind::invalid_argument, "{} must be true or false", name);
    return flag.get<bool>();
  };
  take("tools", request.tools);
  take("documents", request.documents);
  const bool continues = take_flag("continue_final_message", false);
  request.add_generation_prompt = take_flag("add_generation_prompt", !continues);
  check(!continues || !request.add_generation_prompt, ErrorKind::invalid_argument,
        "continue_final_message and add_generation_prompt exclude each other");
  for (const auto& [name, token] : tokenizer_->special_tokens())
    request.special_tokens[name] = token;
  take_text_parts(renderer_->chat_template(request.tools), request);
  RenderedChat rendered = renderer_->render(chat_context(request));
  if (continues) end_in_final_message(rendered, request.messages);
  Prompt prompt(std::move(rendered.text));
  prompt.literal = std::move(rendered.literal);
  prompt.add_special_tokens = false;  // the template spells them out
  return prompt;
}

}  // namespace nanovllm
