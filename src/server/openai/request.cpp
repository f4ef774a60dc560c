#include "server/openai/request.h"

#include <algorithm>
#include <array>
#include <limits>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "io/json_object.h"
#include "io/request_json.h"
#include "server/openai/fields.h"

namespace nanovllm::server {
namespace {

constexpr auto kBad = ErrorKind::invalid_argument;
constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
constexpr size_t kMaxPrompts = 1024, kMaxMessages = 4096, kMaxTemplateBytes = size_t{1} << 20,
                 kMaxTemplateVariables = 256;

// Fields that would change the answer and are not there: refused unless they ask for nothing. The
// value is JSON.
struct Refused {
  std::string_view name, neutral;
};
constexpr Refused kRefused[] = {{"functions", "[]"},
                                {"function_call", "\"none\""},
                                {"audio", "null"},
                                {"web_search_options", "null"},
                                {"mm_processor_kwargs", "{}"},
                                {"use_beam_search", "false"},
                                {"length_penalty", "1"},
                                {"early_stopping", "false"},
                                {"suffix", "\"\""},
                                {"echo", "false"},  // of a chat's last message
                                {"truncation_side", "\"left\""},
                                {"watermarking", "false"},
                                {"kv_transfer_params", "null"},
                                {"vllm_xargs", "{}"},
                                {"prompt_embeds", "null"},
                                {"mcp_servers", "[]"}};

void refuse_what_is_not_there(const JsonObject& o, std::span<const Field> own) {
  for (const auto& [name, neutral] : kRefused) {
    const Json* value = has_field(own, name) ? nullptr : o.find(name);
    if (!value || *value == Json::parse(neutral)) continue;
    fail(kBad, "{} is not supported by this server: leave it out", name);
  }
  if (const Json* modalities = o.find("modalities"))
    check(*modalities == Json::array({"text"}), kBad, "modalities may be [\"text\"] only");
}

bool contains(std::span<const std::string_view> names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

void read_stream(const JsonObject& o, const RequestDefaults& defaults, GenerationRequest& r) {
  r.stream = o.optional_bool("stream").value_or(false);
  const auto options = o.optional_object("stream_options");
  check(!options || r.stream, kBad, "stream_options goes with stream: true only");
  const bool forced = r.stream && defaults.force_include_usage;
  r.include_usage = r.continuous_usage = forced;
  if (!options) return;
  r.include_usage |= options->optional_bool("include_usage").value_or(false);
  r.continuous_usage |=
      options->optional_bool("continuous_usage_stats").value_or(false) && r.include_usage;
}

/// The fields that both endpoints have; `own` are the fields that the endpoint reads itself.
GenerationRequest read_common(const JsonObject& o, const RequestDefaults& defaults,
                              std::span<const Field> own) {
  GenerationRequest r;
  r.model = read_model(o, defaults);
  refuse_what_is_not_there(o, own);
  r.params = defaults.params;
  // No tokens behind an echo are, as in vLLM, one that the answer leaves out.
  const Json* most = o.find("max_tokens");
  r.prompt_alone = has_field(own, "echo") && o.optional_bool("echo").value_or(false) && most &&
                   most->is_number_integer() && *most == 0;
  // The two endpoints have their own logprobs.
  Json sampling = Json::object();
  const std::vector<std::string> names = sampling_params_names();
  for (const auto& [key, value] : o.json().items()) {
    const bool is_sampling = std::ranges::find(names, key) != names.end();
    const bool is_read = has_field(own, key) || has_field(kCommonFields, key);
    if (key == "logprobs" || key == "detokenize") continue;
    if (is_sampling || (is_missing_sampling_param(key) && !is_read))
      sampling[key] = key == "max_tokens" && r.prompt_alone ? Json(1) : value;
    else if (!is_read && std::ranges::find(kRefused, key, &Refused::name) == std::end(kRefused))
      r.ignored.push_back(key);
  }
  read_sampling_params(o.another(sampling), r.params);
  check(!o.find("temperature") || r.params.temperature <= 2, kBad,
        "temperature is {}: it must be from 0 to 2", r.params.temperature);
  r.max_tokens = r.prompt_alone ? 1 : o.optional_integer("max_tokens", 1, kMax);
  read_stream(o, defaults, r);
  check(!r.stream || !r.params.prompt_logprobs, kBad,
        "prompt_logprobs is not supported with stream: leave one of them out");
  r.return_token_ids = o.optional_bool("return_token_ids").value_or(false);
  r.tokens_as_ids = o.optional_bool("return_tokens_as_token_ids").value_or(false);
  r.params.output_kind = r.stream ? OutputKind::delta : OutputKind::final_only;
  return r;
}

std::vector<int32_t> token_ids(const Json& list, size_t index) {
  std::vector<int32_t> ids;
  for (const Json& id : list) {
    check(is_integer_in(id, 0, kMax), kBad,
          "prompt must be token ids of 0 and more, got {} in [{}]", describe(id), index);
    ids.push_back(id.get<int32_t>());
  }
  check(!ids.empty(), kBad, "prompt is empty: it must have at least one token");
  return ids;
}

void read_prompts(const JsonObject& o, GenerationRequest& r) {
  const Json* prompt = o.find("prompt");
  check(prompt != nullptr, kBad, "prompt is missing: a text, token ids, or a list of either");
  const auto add_text = [&](const std::string& text) {
    check(!text.empty(), kBad, "prompt is empty: it must have at least one token");
    r.prompts.emplace_back(text);
  };
  if (prompt->is_string()) return add_text(prompt->get<std::string>());
  if (!prompt->is_array()) o.refuse("prompt", "a text, token ids, or a list of either", *prompt);
  check(!prompt->empty(), kBad, "prompt is empty: it must have at least one token");
  if (prompt->front().is_number()) {
    r.prompts.emplace_back(token_ids(*prompt, 0));
    return;
  }
  check(prompt->size() <= kMaxPrompts, kBad, "prompt has {} entries: at most {} are allowed",
        prompt->size(), kMaxPrompts);
  for (size_t i = 0; i < prompt->size(); ++i) {
    const Json& entry = (*prompt)[i];
    if (entry.is_string())
      add_text(entry.get<std::string>());
    else if (entry.is_array())
      r.prompts.emplace_back(token_ids(entry, i));
    else
      o.refuse("prompt", "a text, token ids, or a list of either", entry);
  }
}

/// The list of messages, checked, with the roles that templates know.
Json read_messages(const JsonObject& o) {
  const Json* messages = o.find("messages");
  check(messages != nullptr, kBad, "messages is missing: a list of at least one message");
  if (!messages->is_array() || messages->empty())
    o.refuse("messages", "a list of at least one message", *messages);
  check(messages->size() <= kMaxMessages, kBad, "messages has {} entries: at most {} are allowed",
        messages->size(), kMaxMessages);
  constexpr std::array<std::string_view, 6> kRoles{"system", "user",      "assistant",
                                                   "tool",   "developer", "function"};
  Json list = *messages;
  for (size_t i = 0; i < list.size(); ++i) {
    Json& message = list[i];
    check(message.is_object() && message.contains("role") && message["role"].is_string(), kBad,
          "messages[{}] must be an object with a role", i);
    const auto& role = message["role"].get_ref<const std::string&>();
    check(contains(kRoles, role), kBad,
          "messages[{}] has the role {}: use system, user, assistant "
          "or tool",
          i, quote(role.substr(0, 64)));
    const auto content = message.find("content");
    const bool is_absent = content == message.end() || content->is_null();
    if (is_absent && (role == "assistant" || role == "tool")) continue;
    check(content != message.end(), kBad, "messages[{}] has no content", i);
    check(content->is_string() || content->is_array(), kBad,
          "messages[{}].content must be a text or a list of parts, got {}", i, describe(*content));
  }
  complete_messages(list);
  return list;
}

std::shared_ptr<const ChatPrompts> read_chat_template(const JsonObject& o,
                                                      const RequestDefaults& defaults) {
  const auto source = o.optional_string("chat_template");
  if (!source) return defaults.chat;
  check(defaults.trust_request_chat_template, kBad,
        "chat_template: this server takes none from requests (--trust-request-chat-template): "
        "leave it out");
  check(source->size() <= kMaxTemplateBytes, kBad, "chat_template has {} bytes: at most {}",
        source->size(), kMaxTemplateBytes);
  try {
    return std::make_shared<ChatPrompts>(defaults.chat->with_template(*source, "chat_template"));
  } catch (const Error& error) {
    throw Error(kBad, error.what());
  }
}

}  // namespace

std::string read_model(const JsonObject& o, const RequestDefaults& defaults) {
  std::string model = o.optional_string("model").value_or("");
  if (model.empty()) model = defaults.model_names.front();
  if (std::ranges::find(defaults.model_names, model) == defaults.model_names.end())
    throw UnknownModel(fmt::format("The model {} does not exist; this server has {}",
                                   quote(model.substr(0, 64)), defaults.model_names.front()));
  return model;
}

Conversation read_conversation(const JsonObject& o, const RequestDefaults& defaults) {
  Conversation conversation;
  conversation.chat = read_chat_template(o, defaults);
  conversation.messages = read_messages(o);
  Json options = Json::parse(defaults.chat_template_kwargs);
  const auto kwargs = o.optional_object("chat_template_kwargs");
  if (kwargs) {
    check(kwargs->json().size() <= kMaxTemplateVariables, kBad,
          "chat_template_kwargs has {} entries: at most {} are allowed", kwargs->json().size(),
          kMaxTemplateVariables);
    options.update(kwargs->json());
  }
  for (const char* name : {"messages", "tokenize", "chat_template"})
    check(!options.contains(name), kBad, "chat_template_kwargs may not have {}", name);
  if (const Json* tools = o.find("tools")) conversation.tools = read_tools(*tools);
  if (!conversation.tools.empty()) options["tools"] = tools_for_template(conversation.tools);
  if (const auto effort = o.optional_string("reasoning_effort")) {
    options["reasoning_effort"] = *effort;
    if (!kwargs || !kwargs->find("enable_thinking")) options["enable_thinking"] = *effort != "none";
  }
  if (const Json* documents = o.find("documents")) options["documents"] = *documents;
  if (const auto add = o.optional_bool("add_generation_prompt"))
    options["add_generation_prompt"] = *add;
  if (const auto go_on = o.optional_bool("continue_final_message"))
    options["continue_final_message"] = *go_on;
  conversation.template_options = std::move(options);
  conversation.add_special_tokens = o.optional_bool("add_special_tokens").value_or(false);
  return conversation;
}

namespace {

/// Reads which calls the answer may have.
void read_calls(const JsonObject& o, const RequestDefaults& defaults, GenerationRequest& r) {
  const std::vector<Tool>& tools = r.conversation.tools;
  r.format = defaults.format;
  if (const Json* choice = o.find("tool_choice")) r.tool_choice = read_tool_choice(*choice, tools);
  r.parallel_tool_calls = o.optional_bool("parallel_tool_calls").value_or(true);
  r.include_reasoning = o.optional_bool("include_reasoning").value_or(true);
  r.parser.only_one_call = !r.parallel_tool_calls;
  r.parser.whole_calls = !r.stream;
  if (tools.empty() || r.tool_choice.kind == ToolChoice::none) return;
  check(
      r.format.tools != nullptr, kBad,
      "tools: this model's chat template does not show how it writes calls; the server's operator "
      "may name the way by --tool-call-parser");
  const std::vector<std::string>& allowed = r.tool_choice.allowed;
  for (const Tool& tool : tools)
    if (allowed.empty() || std::ranges::count(allowed, tool.name) > 0)
      r.parser.tools.push_back(tool);
}

}  // namespace

GenerationRequest read_chat(const Json& body, const RequestDefaults& defaults) {
  const JsonObject o(body, "request body", kBad);
  GenerationRequest r = read_common(o, defaults, kChatFields);
  r.is_chat = true;
  r.conversation = read_conversation(o, defaults);
  read_calls(o, defaults, r);
  if (const auto most = o.optional_integer("max_completion_tokens", 1, kMax)) {
    check(!r.max_tokens || r.max_tokens == most, kBad,
          "max_tokens and max_completion_tokens differ: give one of them");
    r.max_tokens = most;
  }
  if (const auto budget = o.optional_integer("thinking_token_budget", -1, kMax))
    r.params.structured_outputs.thinking_token_budget = *budget;
  // A chat without a limit may take what is left of the context, or what the model recommends.
  r.params.max_tokens =
      r.max_tokens.value_or(defaults.chat_max_tokens.value_or(defaults.max_model_len));
  const bool logprobs = o.optional_bool("logprobs").value_or(false);
  const auto top = o.optional_integer("top_logprobs", 0, 20);
  check(logprobs || !top || *top == 0, kBad, "top_logprobs goes with logprobs: true only");
  r.params.logprobs.reset();
  if (logprobs) r.params.logprobs = static_cast<int>(top.value_or(0));
  return r;
}

GenerationRequest read_completion(const Json& body, const RequestDefaults& defaults) {
  const JsonObject o(body, "request body", kBad);
  GenerationRequest r = read_common(o, defaults, kCompletionFields);
  read_prompts(o, r);
  if (const auto add = o.optional_bool("add_special_tokens"))
    for (Prompt& prompt : r.prompts) prompt.add_special_tokens = *add;
  // Not generation_config.json's max_new_tokens: OpenAI's 16, as in vLLM.
  r.params.max_tokens = r.max_tokens.value_or(SamplingParams().max_tokens);
  r.echo = o.optional_bool("echo").value_or(false);
  r.params.logprobs.reset();
  if (const auto k = o.optional_integer("logprobs", 0, 20)) {
    r.params.logprobs = static_cast<int>(*k);
    if (r.echo) r.params.prompt_logprobs = static_cast<int>(*k);
  }
  return r;
}

// Looking up each key in the object that grows would be quadratic.
Json without_fields(const Json& body, std::span<const Field> fields) {
  Json rest = Json::object();
  Json::object_t::Container& members = rest.get_ref<Json::object_t&>();
  for (const auto& [key, value] : body.get_ref<const Json::object_t&>())
    if (!has_field(fields, key)) members.emplace_back(key, value);
  return rest;
}

std::string text_field(const Json& object, const char* name, const std::string& place) {
  const auto found = object.find(name);
  check(found != object.end() && found->is_string(), kBad, "{}.{} must be a text", place, name);
  return found->get<std::string>();
}

namespace {

/// Whether the client wrote a structural tag; ours is of its tools.
bool has_structural_tag(const Json& body) {
  const Json format = body.value("response_format", Json()),
             asked = body.value("structured_outputs", Json());
  return (format.is_object() && format.value("type", Json()) == "structural_tag") ||
         (asked.is_object() && asked.contains("structural_tag"));
}

}  // namespace

std::string field_at_fault(const Json& body, std::string_view message) {
  for (std::string_view prefix : {"request body: "})
    if (message.starts_with(prefix)) message.remove_prefix(prefix.size());
  size_t end = 0;
  while (end < message.size() &&
         (std::isalnum(static_cast<unsigned char>(message[end])) != 0 || message[end] == '_'))
    ++end;
  const std::string name(message.substr(0, end));
  if (name == "messages" || name == "prompt" || name == "model") return name;
  if (!body.is_object()) return {};
  const auto first_of = [&](std::initializer_list<const char*> fields) -> std::string {
    for (const char* field : fields)
      if (body.contains(field)) return field;
    return {};
  };
  // The engine and the grammars know what is wrong by names of their own.
  constexpr std::array<std::string_view, 5> kStructures{"json", "regex", "choice", "grammar",
                                                        "structural_tag"};
  if (body.contains(name)) return name;
  if (message.starts_with("the prompt ") || name == "prompt_token_ids")
    return first_of({"prompt", "messages", "input"});
  if (!contains(kStructures, name)) return {};
  if (name == "structural_tag" && body.contains("tools") && !has_structural_tag(body))
    return "tools";
  return first_of({"structured_outputs", "response_format", "text", "output_config", "tools"});
}

}  // namespace nanovllm::server
