// Chat templates: the Jinja programs that models publish in tokenizer_config.json, rendered as
// transformers renders them.
//
// The text of a template comes from whoever published the model, so it is treated as hostile: it
// sees nothing but the variables it is given, changes none of them, and runs within limits on
// steps, memory, depth and output.
#pragma once

#include <ctime>
#include <memory>
#include <string>

#include <nlohmann/json.hpp>

#include "io/jinja/render_settings.h"
#include "io/json.h"

namespace nanovllm {

/// Local time, as Python's `datetime.now()`.
std::tm local_time_now();

namespace jinja {
struct Template;
}

/// A parsed template. Immutable: several threads may render it at once.
class ChatTemplate {
 public:
  /// Parses `source`; `name` stands for it in errors ("chat_template", a file name).
  /// Throws Error(model) with `name:line:` for bad syntax, for text that is not UTF-8 and for
  /// nesting over 200 levels.
  explicit ChatTemplate(std::string source, std::string name, ChatClock clock = local_time_now);
  ~ChatTemplate();
  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(ChatTemplate&&) noexcept;

  /// The text for the variables in `context` (an object). Throws Error(invalid_argument): with the
  /// template's own message where it calls raise_exception, else with `name:line:` and what is
  /// wrong.
  std::string render(const Json& context, const ChatTemplateLimits& limits = {}) const;

 private:
  std::unique_ptr<const jinja::Template> template_;
  ChatClock clock_;
};

/// One conversation to render, in the terms of transformers' apply_chat_template.
struct ChatRequest {
  Json messages = Json::array();
  Json tools = nullptr;      ///< array of JSON schemas, or null
  Json documents = nullptr;  ///< array of objects, or null
  bool add_generation_prompt = true;
  Json special_tokens = Json::object();  ///< "bos_token", "eos_token", ... as strings
  /// Further variables ("enable_thinking"); they win over special_tokens.
  Json kwargs = Json::object();
};

/// The variables a template sees for `request`. A message's reasoning is available under each of
/// the names that templates read it by (`reasoning_content`, `thinking`), whichever of
/// `reasoning_content`, `thinking`, `reasoning` it came under. Throws Error(invalid_argument) where
/// a field is not of the kind named above or a message is not an object.
Json chat_context(const ChatRequest& request);

/// Where a message's content is a list of parts, {"type": "text", "text": ...} as OpenAI's clients
/// send it: makes one text of them, joined by line ends as vLLM does, unless the template walks
/// through parts itself. Throws Error(invalid_argument) naming a part that is no text.
void take_text_parts(const ChatTemplate& chat_template, ChatRequest& request);

}  // namespace nanovllm
