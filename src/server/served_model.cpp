#include "server/served_model.h"

#include <algorithm>

#include <fmt/chrono.h>
#include <nlohmann/json.hpp>

#include "io/generation_config.h"

namespace nanovllm::server {
namespace {

ChatPrompts read_chat_template(const ServerOptions& options, const Tokenizer* tokenizer) {
  const bool parse_special = options.engine.parse_special_in_messages;
  return options.chat_template.empty()
             ? ChatPrompts(tokenizer, parse_special)
             : ChatPrompts(tokenizer, parse_special, options.chat_template,
                           options.chat_template_place);
}

}  // namespace

std::vector<std::string> model_names(const ServerOptions& options) {
  return options.served_model_names.empty() ? std::vector{options.model}
                                            : options.served_model_names;
}

RequestDefaults request_defaults(const ServerOptions& options, const LLM& llm) {
  RequestDefaults defaults;
  defaults.model_names = model_names(options);
  defaults.max_model_len = llm.info().max_model_len;
  if (options.generation_config == "auto") {
    defaults.params = llm.default_sampling_params();
    const auto recommended =
        load_generation_config(find_model(options.model), llm.info().vocab_size);
    if (const auto most = recommended.max_new_tokens)
      defaults.chat_max_tokens = std::min(*most, defaults.max_model_len);
  }
  defaults.chat = std::make_shared<ChatPrompts>(read_chat_template(options, llm.tokenizer()));
  defaults.trust_request_chat_template = options.trust_request_chat_template;
  if (llm.tokenizer())
    defaults.format = choose_chat_format(defaults.chat->source(), options.tool_call_parser,
                                         options.reasoning_parser);
  defaults.chat_template_kwargs = options.chat_template_kwargs;
  defaults.force_include_usage = options.force_include_usage;
  defaults.enforce_auto_tool_arguments = !options.no_enforce_auto_tool_arguments;
  return defaults;
}

Json model_card(const ServerOptions& options, const std::string& name, const LLM& llm,
                int64_t created) {
  return {{"id", name},
          {"object", "model"},
          {"type", "model"},
          {"display_name", name},
          {"created", created},
          {"created_at", fmt::format("{:%FT%TZ}", fmt::gmtime(created))},
          {"lifecycle", "active"},
          {"owned_by", "nano-vllm.cpp"},
          {"root", options.model},
          {"parent", nullptr},
          {"max_model_len", llm.info().max_model_len},
          {"permission", Json::array()}};
}

Json tokenizer_info(const ServerOptions& options, const Tokenizer& tokenizer) {
  Json info = Json::object();
  for (const auto& [name, token] : tokenizer.special_tokens()) info[name] = token;
  const std::string& model = tokenizer.chat_template();
  const std::string& source = options.chat_template.empty() ? model : options.chat_template;
  if (!source.empty()) info["chat_template"] = source;
  return info;
}

}  // namespace nanovllm::server
