#include "io/jinja/chat_template.h"

#include <array>

#include "core/check.h"
#include "io/jinja/evaluator.h"
#include "io/jinja/syntax/ast.h"
#include "io/utf8.h"

namespace nanovllm {

std::tm local_time_now() {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  return local;
}

ChatTemplate::ChatTemplate(std::string source, std::string name, ChatClock clock)
    : template_(
          std::make_unique<const jinja::Template>(jinja::parse_template(source, std::move(name)))),
      clock_(std::move(clock)) {}
ChatTemplate::~ChatTemplate() = default;
ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;

std::string ChatTemplate::render(const Json& context, const ChatTemplateLimits& limits) const {
  check(context.is_object(), ErrorKind::invalid_argument, "{}: the variables must be a JSON object",
        template_->name);
  jinja::Runtime runtime(limits, clock_);
  int line = 1;
  try {
    jinja::Evaluator evaluator(*template_, runtime, context);
    try {
      return evaluator.run();
    } catch (const jinja::RenderError&) {
      line = evaluator.line();
      throw;
    }
  } catch (const jinja::RenderError& error) {
    fail(ErrorKind::invalid_argument, "{}:{}: {}", template_->name, line, one_line(error.what()));
  }
}

namespace {

/// Fills in the names under which templates look for a message's reasoning.
Json with_reasoning_aliases(const Json& message) {
  static constexpr std::array<const char*, 3> kFields = {"reasoning_content", "thinking",
                                                         "reasoning"};
  for (const char* field : kFields) {
    const auto found = message.find(field);
    if (found == message.end() || found->is_null()) continue;
    const Json& reasoning = *found;
    Json result = {{"thinking", reasoning}};  // first, where a template prints the message
    Json::object_t::Container& members = result.get_ref<Json::object_t&>();
    bool replaced = false;
    for (const auto& [key, value] : message.get_ref<const Json::object_t&>()) {
      if (key == "thinking") {
        members.front().second = value;
      } else {
        replaced |= key == "reasoning_content";
        members.emplace_back(key, key == "reasoning_content" ? reasoning : value);
      }
    }
    if (!replaced) members.emplace_back("reasoning_content", reasoning);
    return result;
  }
  return message;
}

}  // namespace

Json chat_context(const ChatRequest& request) {
  const auto check_kind = [](bool valid, const char* field, const char* wanted) {
    check(valid, ErrorKind::invalid_argument, "{}: must be {}", field, wanted);
  };
  check_kind(request.messages.is_array(), "messages", "an array of objects");
  check_kind(request.tools.is_null() || request.tools.is_array(), "tools", "an array or null");
  check_kind(request.documents.is_null() || request.documents.is_array(), "documents",
             "an array or null");
  check_kind(request.special_tokens.is_object(), "special_tokens", "an object");
  check_kind(request.kwargs.is_object(), "chat template variables", "an object");

  Json context = Json::object();
  for (const Json* variables : {&request.special_tokens, &request.kwargs}) {
    for (const auto& [name, value] : variables->items()) context[name] = value;
  }
  Json messages = Json::array();
  for (size_t i = 0; i < request.messages.size(); ++i) {
    check(request.messages[i].is_object(), ErrorKind::invalid_argument,
          "messages[{}]: must be an object", i);
    messages.push_back(with_reasoning_aliases(request.messages[i]));
  }
  context["messages"] = std::move(messages);
  context["tools"] = request.tools;
  context["documents"] = request.documents;
  context["add_generation_prompt"] = request.add_generation_prompt;
  return context;
}

}  // namespace nanovllm
