#include "server/prompts.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "nanovllm/tokenizer.h"

#include "chat/structural_tag.h"
#include "constrain/grammar_compiler.h"
#include "core/check.h"
#include "io/json_object.h"
#include "io/request_json.h"
#include "server/anthropic/messages.h"
#include "server/endpoints.h"
#include "server/openai/responses.h"
#include "server/server.h"

namespace nanovllm::server {
namespace {

constexpr auto kBad = ErrorKind::invalid_argument;

/// One of vLLM's GenerateRequest (vllm/entrypoints/scale_out/token_in_token_out/protocol.py): what
/// a router sends on to a server that takes tokens.
Json generate_request(const GenerationRequest& request, const std::vector<int32_t>& tokens,
                      const RequestDefaults& defaults, std::string_view id_prefix) {
  SamplingParams params = request.params;
  params.max_tokens = std::min(params.max_tokens, defaults.max_model_len - std::ssize(tokens));
  Json json = {{"request_id", std::string(id_prefix) + random_id()},
               {"token_ids", tokens},
               {"features", nullptr},
               {"sampling_params", sampling_params_json(params)},
               {"model", request.model},
               {"stream", request.stream},
               {"stream_options", nullptr},
               {"cache_salt", nullptr},
               {"priority", params.priority},
               {"kv_transfer_params", nullptr}};
  if (!params.cache_salt.empty()) json["cache_salt"] = params.cache_salt;
  if (request.stream)
    json["stream_options"] = {{"include_usage", request.include_usage},
                              {"continuous_usage_stats", request.continuous_usage}};
  return json;
}

/// Why calls cannot be forced here; empty where they can.
std::string no_grammar(const GenerationRequest& r, const Tokenizer* tokenizer) {
  if (std::string why; grammar_library(why).empty()) return why;
  if (!tokenizer || r.format.has_special_marks(*tokenizer))
    return "this model's marks of a call are special tokens, which no grammar spells";
  return {};
}

bool compiles(const StructuredOutputs& asked, const LLM& llm) {
  try {
    SamplingParams params;
    params.structured_outputs = asked;
    (void)llm.compile_grammar(params);
    return true;
  } catch (const Error&) {
    return false;
  }
}

bool is_enforceable(const ChatFormat& format, const Tool& tool) {
  try {
    const CallConstraint call{.tools = std::span(&tool, 1), .choice = {ToolChoice::required}};
    (void)grammar_source({.structural_tag = structural_tag(format, call)});
    return true;
  } catch (const Error&) {
    return false;
  }
}

/// Of the schemas that no grammar can keep, but for strict tools', the names are left.
std::vector<Tool> enforceable(const ChatFormat& format, std::vector<Tool> tools) {
  for (Tool& tool : tools)
    if (!tool.strict && !is_enforceable(format, tool)) tool = with_names_alone(std::move(tool));
  return tools;
}

/// The grammar that makes calls valid, where one is asked for. Calls that nothing has to force stay
/// free where there can be no grammar. An answer with a structure of its own has that or calls;
/// one that must be calls has no other.
void constrain_calls(GenerationRequest& r, std::string_view prompt, const RequestDefaults& defaults,
                     const LLM& llm) {
  if (r.parser.tools.empty()) return;
  const bool is_restricted = !r.tool_choice.allowed.empty();
  const bool is_strict = is_restricted || std::ranges::any_of(r.parser.tools, &Tool::strict);
  const bool is_automatic = r.tool_choice.kind == ToolChoice::automatic;
  const bool may_be_free = is_automatic && !is_strict;
  if (may_be_free && !defaults.enforce_auto_tool_arguments) return;
  StructuredOutputs& asked = r.params.structured_outputs;
  const StructuredOutputs given = asked;
  const bool may_open = !r.parser.is_reasoning && !r.format.closes_reasoning(prompt);
  const bool has_budget = may_open && asked.thinking_token_budget >= 0;
  const std::string why_not = no_grammar(r, llm.tokenizer());
  if (may_be_free && (!given.structural_tag.empty() || !why_not.empty())) return;
  const char* field = is_automatic && !is_restricted ? "tools (strict)" : "tool_choice";
  check(given.structural_tag.empty(), kBad,
        "{} and a structural tag of the answer exclude each other: leave one of them out", field);
  check(why_not.empty(), kBad, "{} asks for calls that a grammar forces, and {}: leave it out",
        field, why_not);
  const auto tag_of = [&](std::span<const Tool> tools) {
    return structural_tag(
        r.format, {.tools = tools,
                   .choice = r.tool_choice,
                   .parallel = r.parallel_tool_calls,
                   .may_reason = may_open && !has_budget,  // else constrain_reasoning() sees to it
                   .after_reasoning = r.parser.is_reasoning || has_budget,
                   .structure = given.has_structure() ? &given : nullptr});
  };
  asked = {.structural_tag = tag_of(r.parser.tools),
           .thinking_token_budget = given.thinking_token_budget};
  if (compiles(asked, llm)) return;
  if (is_automatic) {
    const std::string loose = tag_of(enforceable(r.format, r.parser.tools));
    if (loose != asked.structural_tag) {
      asked.structural_tag = loose;
      if (compiles(asked, llm)) return;
    }
  }
  if (may_be_free)
    asked = given;
  else if (given.has_structure())
    (void)grammar_source(given);  // the client's structure may be what is wrong
}

/// The reasoning that may come before a structure, or has a budget. Where the prompt has not opened
/// its block, the answer may do so.
void constrain_reasoning(GenerationRequest& r, std::string_view prompt, const LLM& llm) {
  StructuredOutputs& asked = r.params.structured_outputs;
  const ReasoningFormat* reasoning = r.format.reasoning;
  if (!reasoning || r.format.closes_reasoning(prompt)) {
    asked.thinking_token_budget = -1;  // there is no reasoning to bound
  } else if (r.parser.is_reasoning || asked.thinking_token_budget >= 0) {
    asked.reasoning_end = reasoning->end.front();
    if (!r.parser.is_reasoning) asked.reasoning_begin = reasoning->begin.front();
  } else if (asked.has_structure() && asked.structural_tag.empty()) {
    StructuredOutputs wrapped = {.structural_tag = structure_after_reasoning(asked, *reasoning)};
    // An error names the client's structure, not a part of ours.
    if (!compiles(wrapped, llm)) (void)grammar_source(asked);
    asked = std::move(wrapped);
  }
}

/// Whether the answer goes on with a message that ends in its reasoning. The marks are the same in
/// JSON, which all forms of a content have.
bool continues_reasoning(const GenerationRequest& r) {
  const Conversation& c = r.conversation;
  return c.template_options.value("continue_final_message", Json()) == true &&
         r.format.ends_in_reasoning(dump_json(c.messages.back().value("content", Json())));
}

/// Sets what the answer of a chat with this prompt asks of the engine and of its parser.
void prepare_answer(GenerationRequest& r, const Prompt& prompt, const RequestDefaults& defaults,
                    const LLM& llm) {
  const auto& text = std::get<std::string>(prompt.value);
  const bool opens = r.format.opens_reasoning(text);
  r.parser.is_within = r.parser.is_reasoning && !opens;
  r.parser.is_reasoning |= opens;
  if (r.params.skip_special_tokens && llm.tokenizer())
    r.params.visible_special_token_ids =
        r.format.visible_tokens(*llm.tokenizer(), !r.parser.tools.empty());
  constrain_calls(r, text, defaults, llm);
  constrain_reasoning(r, text, llm);
}

}  // namespace

Prompt Conversation::take_prompt() {
  Prompt prompt = chat->prompt(std::move(messages), std::move(template_options));
  prompt.add_special_tokens = add_special_tokens;
  return prompt;
}

std::vector<std::vector<int32_t>> tokenize_prompts(GenerationRequest& request,
                                                   const RequestDefaults& defaults,
                                                   const LLM& llm) {
  std::vector<std::vector<int32_t>> prompts;
  const auto add = [&](const Prompt& prompt) {
    const auto& tokens = prompts.emplace_back(llm.tokenize(prompt, request.params));
    const int64_t length = std::ssize(tokens), most = defaults.max_model_len;
    check(
        !request.max_tokens || length + *request.max_tokens <= most, kBad,
        "max_tokens is {}, and the prompt has {} tokens. This model's maximum context length is {} "
        "tokens",
        request.max_tokens.value_or(0), length, most);
    llm.check_request(tokens, request.params);
  };
  if (request.is_chat) {
    request.parser.is_reasoning = continues_reasoning(request);
    const Prompt prompt = request.conversation.take_prompt();
    prepare_answer(request, prompt, defaults, llm);
    add(prompt);
  }
  for (const Prompt& prompt : request.prompts) add(prompt);
  return prompts;
}

HttpResponse refusal(std::exception_ptr thrown, const Json& body, ErrorStyle style) {
  try {
    std::rethrow_exception(std::move(thrown));
  } catch (const UnknownModel& error) {
    return error_response(404, error.what(), "model", style);
  } catch (const Error& error) {
    return error_response(status_of(error.kind()), error.what(), field_at_fault(body, error.what()),
                          style);
  } catch (const std::exception& error) {
    return error_response(500, error.what(), {}, style);
  }
}

// Not std::random_device: it asks for the processor's kind first, which a virtual machine traps.
std::string random_id() {
  std::array<uint64_t, 2> bits{};
  check(::getentropy(bits.data(), sizeof bits) == 0, ErrorKind::engine,
        "the system gives no random numbers");
  return fmt::format("{:016x}{:016x}", bits[0], bits[1]);
}

JsonLimits body_limits(const ServerOptions& options) {
  return {.max_bytes = options.http.max_body_bytes, .max_nodes = 1'000'000};
}

HttpResponse json_response(const Json& json) { return {.body = dump_json(json)}; }

HttpResponse tokenize(const Json& body, const RequestDefaults& defaults, const LLM& llm) {
  const JsonObject o(body, "request body", kBad);
  (void)read_model(o, defaults);
  std::vector<int32_t> tokens;
  if (o.find("messages")) {
    tokens = llm.tokenize(read_conversation(o, defaults).take_prompt());
  } else {
    const auto text = o.optional_string("prompt");
    check(text.has_value(), kBad, "prompt is missing: give a text, or messages");
    Prompt prompt(*text);
    prompt.add_special_tokens = o.optional_bool("add_special_tokens").value_or(true);
    tokens = llm.tokenize(prompt);
  }
  Json json = {
      {"count", tokens.size()}, {"max_model_len", defaults.max_model_len}, {"tokens", tokens}};
  if (o.optional_bool("return_token_strs") == true) {
    Json texts = Json::array();
    for (const int32_t id : tokens) texts.push_back(llm.tokenizer()->id_to_token(id));
    json["token_strs"] = std::move(texts);
  }
  return json_response(json);
}

HttpResponse detokenize(const Json& body, const RequestDefaults& defaults, const LLM& llm) {
  const JsonObject o(body, "request body", kBad);
  (void)read_model(o, defaults);
  check(llm.tokenizer() != nullptr, kBad, "this server has no tokenizer");
  const auto ids = o.optional_integers("tokens", 0, llm.info().vocab_size - 1);
  check(ids.has_value(), kBad, "tokens is missing: a list of token ids");
  const std::vector<int32_t> tokens(ids->begin(), ids->end());
  return json_response({{"prompt", llm.tokenizer()->decode(tokens, false)}});
}

namespace {

HttpResponse render(const Json& body, const RequestDefaults& defaults, const LLM& llm,
                    std::string_view path) {
  const GenerationEndpoint& endpoint = *find_generation_endpoint(path);
  GenerationRequest request = endpoint.read(body, defaults);
  Json list = Json::array();
  for (const auto& tokens : tokenize_prompts(request, defaults, llm))
    list.push_back(generate_request(request, tokens, defaults, endpoint.id_prefix));
  return json_response(request.is_chat ? list.front() : list);
}

}  // namespace

HttpResponse render_chat(const Json& body, const RequestDefaults& defaults, const LLM& llm) {
  return render(body, defaults, llm, "/v1/chat/completions");
}
HttpResponse render_completion(const Json& body, const RequestDefaults& defaults, const LLM& llm) {
  return render(body, defaults, llm, "/v1/completions");
}
HttpResponse render_message(const Json& body, const RequestDefaults& defaults, const LLM& llm) {
  return render(body, defaults, llm, "/v1/messages");
}

HttpResponse count_tokens(const Json& body, const RequestDefaults& defaults, const LLM& llm) {
  GenerationRequest request = read_message_prompt(body, defaults);
  const Prompt prompt = request.conversation.take_prompt();
  return json_response({{"input_tokens", llm.tokenize(prompt).size()}});
}

HttpResponse count_input_tokens(const Json& body, const RequestDefaults& defaults, const LLM& llm) {
  const Prompt prompt = read_response(body, defaults).conversation.take_prompt();
  return json_response(
      {{"object", "response.input_tokens"}, {"input_tokens", llm.tokenize(prompt).size()}});
}

}  // namespace nanovllm::server
