#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "server/anthropic/messages.h"
#include "server/http/error_body.h"

namespace nanovllm::server {
namespace {

/// Content blocks as they grow; a whole answer is made of the blocks that its stream would have.
class MessageWriter final : public AnswerWriter {
 public:
  explicit MessageWriter(const WriterContext& context) : context_(context) {}

  void begin(std::string& out) override {
    Json message = head();
    message["content"] = Json::array();
    message["stop_reason"] = message["stop_sequence"] = nullptr;
    message["usage"] = usage();
    add_event(out, "message_start", ",\"message\":" + dump_json(message));
    out += keep_alive();
  }

  void write(std::string& out, size_t /*choice*/, const ChatDelta& delta,
             const CompletionOutput& answer) override {
    if (!delta.reasoning.empty()) {
      if (open_ != "thinking")
        open(out, {{"type", "thinking"}, {"thinking", ""}, {"signature", ""}});
      grow(out, "thinking", "thinking_delta", "thinking", delta.reasoning);
    }
    if (!delta.content.empty()) {
      if (open_ != "text") open(out, {{"type", "text"}, {"text", ""}});
      grow(out, "text", "text_delta", "text", delta.content);
    }
    for (const ToolCallDelta& call : delta.tool_calls) {
      if (!call.id.empty())
        open(out, {{"type", "tool_use"},
                   {"id", call.id},
                   {"name", call.name},
                   {"input", Json::object()}});
      if (call.arguments.empty()) continue;
      arguments_ += call.arguments;
      add_delta(out, "input_json_delta", "partial_json", call.arguments);
    }
    if (answer.finished()) finish(out, answer);
  }

  void end(std::string& out) override {
    add_event(out, "message_delta",
              ",\"delta\":" +
                  dump_json({{"stop_reason", stop_reason_}, {"stop_sequence", stop_sequence_}}) +
                  ",\"usage\":" + dump_json(usage()));
    add_event(out, "message_stop", "");
  }

  void fail(std::string& out, int status, std::string_view message,
            std::string_view param) override {
    out +=
        "event: error\ndata: " + error_body(status, message, param, ErrorStyle::anthropic) + "\n\n";
  }

  std::string_view keep_alive() const override {
    return "event: ping\ndata: {\"type\":\"ping\"}\n\n";
  }

  std::string whole(const std::vector<RequestOutput>& outputs,
                    const std::vector<ChatMessage>& messages) override {
    std::string events;
    write(events, 0, messages.front().delta(), outputs.front().outputs.front());
    Json body = head();
    body["content"] = blocks_;
    body["stop_reason"] = stop_reason_;
    body["stop_sequence"] = stop_sequence_;
    body["usage"] = usage();
    return dump_json(body);
  }

 private:
  static void add_event(std::string& out, std::string_view type, std::string_view fields) {
    out += fmt::format("event: {0}\ndata: {{\"type\":\"{0}\"{1}}}\n\n", type, fields);
  }

  Json head() const {
    return {{"id", context_.summary.id},
            {"type", "message"},
            {"role", "assistant"},
            {"model", context_.request.model}};
  }

  Json usage() const {
    const GenerationSummary& summary = context_.summary;
    const int64_t cached = context_.options.prompt_details ? summary.cached_tokens : 0;
    return {{"input_tokens", summary.prompt_tokens - cached},
            {"cache_creation_input_tokens", 0},
            {"cache_read_input_tokens", cached},
            {"output_tokens", summary.completion_tokens}};
  }

  void open(std::string& out, Json block) {
    close(out);
    open_ = block["type"].get<std::string>();
    add_event(out, "content_block_start",
              fmt::format(",\"index\":{},\"content_block\":{}", blocks_.size(), dump_json(block)));
    blocks_.push_back(std::move(block));
  }

  void grow(std::string& out, const char* field, std::string_view delta_type,
            std::string_view delta_field, const std::string& text) {
    blocks_.back()[field].get_ref<std::string&>() += text;
    add_delta(out, delta_type, delta_field, text);
  }

  void add_delta(std::string& out, std::string_view type, std::string_view field,
                 std::string_view text) {
    std::string fields = fmt::format(
        ",\"index\":{},\"delta\":{{\"type\":\"{}\",\"{}\":", blocks_.size() - 1, type, field);
    append_json(fields, text);
    add_event(out, "content_block_delta", fields + "}");
  }

  void close(std::string& out) {
    if (open_.empty()) return;
    if (open_ == "tool_use") {
      // Arguments that were cut off are shown as far as they go: in the stream alone.
      const Json input = Json::parse(arguments_, nullptr, false);
      if (input.is_object()) blocks_.back()["input"] = input;
      arguments_.clear();
      has_calls_ = true;
    }
    add_event(out, "content_block_stop", fmt::format(",\"index\":{}", blocks_.size() - 1));
    open_.clear();
  }

  void finish(std::string& out, const CompletionOutput& answer) {
    close(out);
    const auto& stops = context_.request.params.stop;
    if (answer.finish_reason == FinishReason::length) {
      stop_reason_ = "max_tokens";
    } else if (answer.finish_reason == FinishReason::stop) {
      const bool by_text = std::ranges::find(stops, answer.stop_reason) != stops.end();
      stop_reason_ = by_text ? "stop_sequence" : has_calls_ ? "tool_use" : "end_turn";
      if (by_text) stop_sequence_ = answer.stop_reason;
    }
  }

  const WriterContext context_;
  Json blocks_ = Json::array();
  std::string open_;       // the last block's type, while it grows
  std::string arguments_;  // of the tool_use that grows
  bool has_calls_ = false;
  Json stop_reason_, stop_sequence_;
};

}  // namespace

std::unique_ptr<AnswerWriter> make_message_writer(const WriterContext& context) {
  return std::make_unique<MessageWriter>(context);
}

}  // namespace nanovllm::server
