#include <ctime>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "server/http/error_body.h"
#include "server/openai/logprobs.h"
#include "server/openai/responses.h"

namespace nanovllm::server {
namespace {

/// Output items as they grow; a whole answer is made of the items that its stream would have.
class ResponseWriter final : public AnswerWriter {
 public:
  explicit ResponseWriter(const WriterContext& context)
      : context_(context),
        logprobs_{context.tokenizer, context.request.tokens_as_ids},
        number_(context.summary.id.substr(context.summary.id.find('_') + 1)) {}

  void begin(std::string& out) override {
    for (const char* type : {"response.created", "response.in_progress"})
      add_event(out, type, {{"response", response("in_progress")}});
  }

  void write(std::string& out, size_t /*choice*/, const ChatDelta& delta,
             const CompletionOutput& answer) override {
    if (!delta.reasoning.empty()) {
      if (open_ != Item::reasoning) open_reasoning(out);
      grow(out, "response.reasoning_text.delta", delta.reasoning, Json());
    }
    if (context_.request.params.logprobs) {
      const Json entries = logprobs_.chat(answer.logprobs);
      for (const Json& entry : entries["content"]) pending_logprobs_.push_back(entry);
    }
    if (!delta.content.empty()) {
      if (open_ != Item::message) open_message(out);
      grow(out, "response.output_text.delta", delta.content, take_logprobs());
    }
    for (const ToolCallDelta& call : delta.tool_calls) {
      if (!call.id.empty()) open_call(out, call);
      if (call.arguments.empty()) continue;
      item()["arguments"].get_ref<std::string&>() += call.arguments;
      add_event(out, "response.function_call_arguments.delta",
                {{"item_id", item()["id"]},
                 {"output_index", output_.size() - 1},
                 {"delta", call.arguments}});
    }
    if (!answer.finished()) return;
    // Tokens behind the last text, such as EOS.
    if (open_ == Item::message && !pending_logprobs_.empty())
      grow(out, "response.output_text.delta", "", take_logprobs());
    const bool is_cut = answer.finish_reason != FinishReason::stop;
    close(out, is_cut ? "incomplete" : "completed");
    status_ = is_cut ? "incomplete" : "completed";
    if (answer.finish_reason == FinishReason::length)
      incomplete_ = {{"reason", "max_output_tokens"}};
    else if (is_cut)
      incomplete_ = {{"reason", "content_filter"}};  // the schema has no word for an abort
  }

  void end(std::string& out) override {
    add_event(out, status_ == "completed" ? "response.completed" : "response.incomplete",
              {{"response", response(status_)}});
  }

  void fail(std::string& out, int status, std::string_view message,
            std::string_view /*param*/) override {
    error_ = {{"code", status == 503 ? "rate_limit_exceeded" : "server_error"},
              {"message", message}};
    close(out, "incomplete");
    add_event(out, "response.failed", {{"response", response("failed")}});
  }

  std::string whole(const std::vector<RequestOutput>& outputs,
                    const std::vector<ChatMessage>& messages) override {
    std::string events;
    write(events, 0, messages.front().delta(), outputs.front().outputs.front());
    return dump_json(response(status_));
  }

 private:
  enum class Item { none, reasoning, message, call };

  Json take_logprobs() { return std::exchange(pending_logprobs_, Json::array()); }

  Json& item() { return output_.back(); }
  Json& part() { return item()["content"].back(); }

  // Every event has its number.
  void add_event(std::string& out, std::string_view type, const Json& fields) {
    Json event = {{"type", type}, {"sequence_number", sequence_number_++}};
    event.update(fields);
    out += fmt::format("event: {}\ndata: {}\n\n", type, dump_json(event));
  }
  Json place() {
    return {{"item_id", item()["id"]},
            {"output_index", output_.size() - 1},
            {"content_index", item()["content"].size() - 1}};
  }
  void add_part_event(std::string& out, std::string_view type, Json fields) {
    Json event = place();
    event.update(fields);
    add_event(out, type, event);
  }

  void open(std::string& out, Item kind, const char* prefix, Json fields) {
    close(out, "completed");
    open_ = kind;
    Json made = {{"id", fmt::format("{}_{}{}", prefix, number_, output_.size())}};
    made.update(fields);
    output_.push_back(std::move(made));
    add_event(out, "response.output_item.added",
              {{"output_index", output_.size() - 1}, {"item", item()}});
  }
  void open_part(std::string& out, Json fields) {
    item()["content"].push_back(std::move(fields));
    add_part_event(out, "response.content_part.added", {{"part", part()}});
  }
  void open_reasoning(std::string& out) {
    open(out, Item::reasoning, "rs",
         {{"type", "reasoning"},
          {"summary", Json::array()},
          {"content", Json::array()},
          {"status", "in_progress"}});
    open_part(out, {{"type", "reasoning_text"}, {"text", ""}});
  }
  void open_message(std::string& out) {
    open(out, Item::message, "msg",
         {{"type", "message"},
          {"role", "assistant"},
          {"status", "in_progress"},
          {"content", Json::array()}});
    open_part(out, {{"type", "output_text"},
                    {"text", ""},
                    {"annotations", Json::array()},
                    {"logprobs", Json::array()}});
  }
  void open_call(std::string& out, const ToolCallDelta& call) {
    Json fields = {{"type", "function_call"},
                   {"call_id", call.id},
                   {"name", call.name},
                   {"arguments", ""},
                   {"status", "in_progress"}};
    const auto& namespaced = context_.request.namespaced;
    if (const auto found = namespaced.find(call.name); found != namespaced.end())
      fields.update({{"name", found->second.name}, {"namespace", found->second.space}});
    open(out, Item::call, "fc", std::move(fields));
  }

  void grow(std::string& out, std::string_view type, const std::string& text,
            const Json& logprobs) {
    part()["text"].get_ref<std::string&>() += text;
    Json event = {{"delta", text}};
    if (logprobs.is_array()) {
      event["logprobs"] = logprobs;
      for (const Json& entry : logprobs) part()["logprobs"].push_back(entry);
    }
    add_part_event(out, type, std::move(event));
  }

  void close(std::string& out, const char* status) {
    if (open_ == Item::none) return;
    if (open_ == Item::call) {
      add_event(out, "response.function_call_arguments.done",
                {{"item_id", item()["id"]},
                 {"output_index", output_.size() - 1},
                 {"name", item()["name"]},
                 {"arguments", item()["arguments"]}});
    } else {
      const bool is_message = open_ == Item::message;
      Json done = {{"text", part()["text"]}};
      if (is_message) done["logprobs"] = part()["logprobs"];
      add_part_event(out, is_message ? "response.output_text.done" : "response.reasoning_text.done",
                     std::move(done));
      add_part_event(out, "response.content_part.done", {{"part", part()}});
    }
    item()["status"] = status;
    add_event(out, "response.output_item.done",
              {{"output_index", output_.size() - 1}, {"item", item()}});
    open_ = Item::none;
  }

  Json response(std::string_view status) const {
    Json json = {{"id", context_.summary.id},
                 {"object", "response"},
                 {"created_at", context_.created},
                 {"status", status},
                 {"error", error_},
                 {"incomplete_details", incomplete_},
                 {"model", context_.request.model},
                 {"output", output_}};
    json.update(parse_json(context_.request.echo_json, "the request", ErrorKind::invalid_argument));
    json["completed_at"] = status == "completed" ? Json(std::time(nullptr)) : Json();
    json["usage"] = nullptr;
    if (status == "in_progress") return json;
    const GenerationSummary& s = context_.summary;
    json["usage"] = {{"input_tokens", s.prompt_tokens},
                     {"input_tokens_details",
                      {{"cached_tokens", context_.options.prompt_details ? s.cached_tokens : 0},
                       {"cache_write_tokens", 0}}},
                     {"output_tokens", s.completion_tokens},
                     {"output_tokens_details", {{"reasoning_tokens", s.reasoning_tokens}}},
                     {"total_tokens", s.prompt_tokens + s.completion_tokens}};
    return json;
  }

  const WriterContext context_;
  const LogprobsJson logprobs_;
  const std::string number_;  // of the answer, in the ids of its items
  Json output_ = Json::array(), error_, incomplete_;
  Json pending_logprobs_ = Json::array();  // of tokens whose text has not come yet
  Item open_ = Item::none;
  std::string status_ = "completed";
  int64_t sequence_number_ = 0;
};

}  // namespace

std::unique_ptr<AnswerWriter> make_response_writer(const WriterContext& context) {
  return std::make_unique<ResponseWriter>(context);
}

}  // namespace nanovllm::server
