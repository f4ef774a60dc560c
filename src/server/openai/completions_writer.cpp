#include "server/openai/completions_writer.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "server/http/error_body.h"
#include "server/openai/logprobs.h"

namespace nanovllm::server {
namespace {

/// OpenAI's and vLLM's: a call that the client forced by its name is no news.
const char* reason(FinishReason r, bool has_calls, const ToolChoice& choice) {
  if (r == FinishReason::stop && has_calls && choice.kind != ToolChoice::named) return "tool_calls";
  return r == FinishReason::none ? nullptr : to_string(r);
}

/// vLLM's: null for EOS and length, a token's id as a number, a stop string as a text.
Json stop_reason(const std::string& text, const SamplingParams& params) {
  if (text.empty()) return nullptr;
  for (const int64_t id : params.stop_token_ids)
    if (std::to_string(id) == text) return id;
  return text;
}

/// The answers of /v1/chat/completions and /v1/completions.
class CompletionsWriter final : public AnswerWriter {
 public:
  explicit CompletionsWriter(const WriterContext& context)
      : context_(context),
        request_(context.request),
        logprobs_{context.tokenizer, request_.tokens_as_ids},
        has_begun_(context.prompts.size() * static_cast<size_t>(request_.params.n)),
        has_calls_(has_begun_.size()),
        text_offsets_(has_begun_.size()) {
    head_ = "{\"id\":";
    append_json(head_, context.summary.id);
    head_ += fmt::format(",\"object\":\"{}\",\"created\":{},\"model\":",
                         request_.is_chat ? "chat.completion.chunk" : "text_completion",
                         context.created);
    append_json(head_, request_.model);
    head_ += fmt::format(",\"system_fingerprint\":\"{}\"", context_.options.fingerprint);
  }

  void write(std::string& out, size_t choice, const ChatDelta& delta,
             const CompletionOutput& answer) override;
  void end(std::string& out) override;
  void fail(std::string& out, int status, std::string_view message,
            std::string_view param) override {
    add_event(out, error_body(status, message, param));
    out += kDone;
  }
  std::string whole(const std::vector<RequestOutput>& outputs,
                    const std::vector<ChatMessage>& messages) override;

 private:
  static constexpr std::string_view kDone = "data: [DONE]\n\n";
  static void add_event(std::string& out, std::string_view json) {
    out += "data: ";
    out += json;
    out += "\n\n";
  }
  std::string chunk(size_t choice, const std::string& body, const std::string& logprobs,
                    const char* finish_reason, const std::string& stop_reason);
  static std::string call_delta(const ToolCallDelta& call);
  std::string usage() const;
  Json own_ids(size_t choice, const CompletionOutput& answer) const;
  const char* reasoning_name() const {
    return context_.options.reasoning_content ? "reasoning_content" : "reasoning";
  }
  void add_prompt(Json& json, size_t p, const RequestOutput& output) const;
  Json message_json(const ChatMessage& message) const;
  Json choice_json(size_t p, const RequestOutput& output, const CompletionOutput& answer,
                   const ChatMessage& message) const;

  const WriterContext context_;
  const GenerationRequest& request_;
  const LogprobsJson logprobs_;
  std::string head_;                  // what all chunks of a stream begin with
  std::vector<bool> has_begun_;       // choices whose first chunk has been sent
  std::vector<bool> has_calls_;       // choices that call tools
  std::vector<size_t> text_offsets_;  // of completions' logprobs, by choice
};

// -- Streams

std::string CompletionsWriter::chunk(size_t choice, const std::string& body,
                                     const std::string& logprobs, const char* finish_reason,
                                     const std::string& stop) {
  std::string json = head_ + fmt::format(
                                 ",\"choices\":[{{\"index\":{},{},\"logprobs\":{},"
                                 "\"finish_reason\":",
                                 choice, body, logprobs);
  json += finish_reason ? fmt::format("\"{}\"", finish_reason) : "null";
  if (finish_reason) json += ",\"stop_reason\":" + dump_json(stop_reason(stop, request_.params));
  // As in vLLM's streams, the first chunk has the prompt's tokens: beside a chat's choice, within a
  // completion's.
  std::string prompt_ids;
  if (request_.return_token_ids && !has_begun_[choice])
    prompt_ids = ",\"prompt_token_ids\":" +
                 dump_json(context_.prompts[choice / static_cast<size_t>(request_.params.n)]);
  has_begun_[choice] = true;
  json += request_.is_chat ? "}]" + prompt_ids : prompt_ids + "}]";
  if (request_.continuous_usage) json += ",\"usage\":" + usage();
  return json + "}";
}

void CompletionsWriter::write(std::string& out, size_t choice, const ChatDelta& delta,
                              const CompletionOutput& answer) {
  if (request_.is_chat && !has_begun_[choice])
    add_event(out, chunk(choice, "\"delta\":{\"role\":\"assistant\",\"content\":\"\"}", "null",
                         nullptr, ""));
  const bool has_logprobs = request_.params.logprobs && !answer.logprobs.empty();
  if (!delta.reasoning.empty() || !delta.content.empty() || has_logprobs ||
      request_.return_token_ids) {
    std::string body = request_.is_chat ? "\"delta\":{" : "\"text\":";
    if (!delta.reasoning.empty()) {
      append_json(body, reasoning_name());
      body += ":";
      append_json(body, delta.reasoning);
      if (!delta.content.empty()) body += ",";
    }
    if (request_.is_chat && (delta.reasoning.empty() || !delta.content.empty()))
      body += "\"content\":";
    if (delta.reasoning.empty() || !delta.content.empty()) append_json(body, delta.content);
    if (request_.is_chat) body += "}";
    if (request_.return_token_ids) body += ",\"token_ids\":" + dump_json(own_ids(choice, answer));
    std::string logprobs = "null";
    if (has_logprobs)
      logprobs =
          dump_json(request_.is_chat ? logprobs_.chat(answer.logprobs)
                                     : logprobs_.completion(answer.token_ids, answer.logprobs,
                                                            text_offsets_[choice]));
    add_event(out, chunk(choice, body, logprobs, nullptr, ""));
  }
  for (const ToolCallDelta& call : delta.tool_calls)
    add_event(out, chunk(choice, call_delta(call), "null", nullptr, ""));
  has_calls_[choice] = has_calls_[choice] || !delta.tool_calls.empty();
  if (answer.finished())
    add_event(out, chunk(choice, request_.is_chat ? "\"delta\":{}" : "\"text\":\"\"", "null",
                         reason(answer.finish_reason, has_calls_[choice], request_.tool_choice),
                         answer.stop_reason));
}

/// One event for each: clients take a list's first appearance as it is, and add up what follows.
std::string CompletionsWriter::call_delta(const ToolCallDelta& call) {
  Json json = {{"index", call.index}};
  if (!call.name.empty()) {
    json["id"] = call.id;
    json["type"] = "function";
    json["function"]["name"] = call.name;
  }
  json["function"]["arguments"] = call.arguments;
  return "\"delta\":{\"tool_calls\":[" + dump_json(json) + "]}";
}

void CompletionsWriter::end(std::string& out) {
  if (request_.include_usage) add_event(out, head_ + ",\"choices\":[],\"usage\":" + usage() + "}");
  out += kDone;
}

std::string CompletionsWriter::usage() const {
  std::string json =
      fmt::format("{{\"prompt_tokens\":{},\"total_tokens\":{},\"completion_tokens\":{}",
                  context_.summary.prompt_tokens,
                  context_.summary.prompt_tokens + context_.summary.completion_tokens,
                  context_.summary.completion_tokens);
  if (request_.format.reasoning)
    json += fmt::format(",\"completion_tokens_details\":{{\"reasoning_tokens\":{}}}",
                        context_.summary.reasoning_tokens);
  if (context_.options.prompt_details)
    json += fmt::format(",\"prompt_tokens_details\":{{\"cached_tokens\":{}}}",
                        context_.summary.cached_tokens);
  return json + "}";
}

/// Without those of an echo.
Json CompletionsWriter::own_ids(size_t choice, const CompletionOutput& answer) const {
  const auto& prompt = context_.prompts[choice / static_cast<size_t>(request_.params.n)];
  const auto echoed = request_.echo && !has_begun_[choice] ? std::ssize(prompt) : 0;
  return std::vector(answer.token_ids.begin() + echoed, answer.token_ids.end());
}

// -- Whole answers

std::string CompletionsWriter::whole(const std::vector<RequestOutput>& outputs,
                                     const std::vector<ChatMessage>& messages) {
  std::string text =
      dump_json({{"id", context_.summary.id},
                 {"object", request_.is_chat ? "chat.completion" : "text_completion"},
                 {"created", context_.created},
                 {"model", request_.model},
                 {"system_fingerprint", context_.options.fingerprint}});
  text.back() = ',';
  text += "\"choices\":[";
  size_t choice = 0;  // log probabilities take many times their text's bytes: one choice at a time
  for (size_t p = 0; p < outputs.size(); ++p) {
    for (const CompletionOutput& answer : outputs[p].outputs) {
      if (choice > 0) text += ",";
      text += dump_json(choice_json(p, outputs[p], answer, messages[choice++]));
    }
  }
  text += "],\"usage\":" + usage();
  Json prompt = Json::object();
  if (request_.is_chat) add_prompt(prompt, 0, outputs.front());
  return text + (prompt.empty() ? "}" : "," + dump_json(prompt).substr(1));
}

Json CompletionsWriter::message_json(const ChatMessage& message) const {
  Json json = {{"role", "assistant"}, {"content", message.content}};
  const bool has_more = !message.reasoning.empty() || !message.tool_calls.empty();
  if (message.content.empty() && has_more) json["content"] = nullptr;
  if (!message.reasoning.empty()) json[reasoning_name()] = message.reasoning;
  for (const ToolCall& call : message.tool_calls)
    json["tool_calls"].push_back(
        {{"id", call.id},
         {"type", "function"},
         {"function", {{"name", call.name}, {"arguments", call.arguments}}}});
  return json;
}

/// The prompt's own answers, where they were asked for: vLLM has them beside the choices of a chat,
/// and in each choice of a completion.
void CompletionsWriter::add_prompt(Json& json, size_t p, const RequestOutput& output) const {
  if (request_.params.prompt_logprobs)
    json["prompt_logprobs"] = logprobs_.prompt(output.prompt_logprobs);
  if (request_.return_token_ids) json["prompt_token_ids"] = context_.prompts[p];
}

Json CompletionsWriter::choice_json(size_t p, const RequestOutput& output,
                                    const CompletionOutput& answer,
                                    const ChatMessage& message) const {
  Json choice = {{"index", static_cast<int64_t>(p) * request_.params.n + answer.index}};
  if (request_.is_chat) {
    choice["message"] = message_json(message);
    choice["logprobs"] = nullptr;
    if (request_.params.logprobs) choice["logprobs"] = logprobs_.chat(answer.logprobs);
  } else {
    choice["text"] = answer.text;
    choice["logprobs"] = nullptr;
    size_t offset = 0;
    if (request_.params.logprobs)
      choice["logprobs"] = logprobs_.completion(answer.token_ids, answer.logprobs, offset);
  }
  choice["finish_reason"] =
      reason(answer.finish_reason, !message.tool_calls.empty(), request_.tool_choice);
  choice["stop_reason"] = stop_reason(answer.stop_reason, request_.params);
  if (request_.return_token_ids) choice["token_ids"] = own_ids(choice["index"], answer);
  if (!request_.is_chat) add_prompt(choice, p, output);
  return choice;
}

}  // namespace

std::unique_ptr<AnswerWriter> make_completions_writer(const WriterContext& context) {
  return std::make_unique<CompletionsWriter>(context);
}

}  // namespace nanovllm::server
