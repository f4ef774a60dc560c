// The events of an answer that reasons and calls a tool, as Anthropic's and OpenAI's documentation
// show them (Messages: "Streaming with tool use", "extended thinking"; Responses: "Streaming
// function calls"); and the whole answer of the same.
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "server/endpoints.h"
#include "server/openai/logprobs.h"

namespace nanovllm::server {
namespace {

struct Written {
  std::vector<std::string> types;  // repeated ones once
  std::vector<Json> events;
  Json whole;
};

/// The same answer, streamed in pieces and whole, by the writer of `path`.
Written write(const std::string& path) {
  GenerationRequest request;
  request.is_chat = true;
  request.model = "demo";
  request.echo_json = "{}";
  const std::vector<std::vector<int32_t>> prompts(1, {1, 2, 3});
  const GenerationSummary summary{
      .id = "x_1", .model = "demo", .prompt_tokens = 3, .completion_tokens = 9};
  const WriterContext context{.request = request, .prompts = prompts, .summary = summary};
  const GenerationEndpoint& endpoint = *find_generation_endpoint(path);
  RequestOutput output;
  CompletionOutput& answer = output.outputs.emplace_back();
  std::string out;
  const auto stream = endpoint.make_writer(context);
  stream->begin(out);
  stream->write(out, 0, {.reasoning = "Let me "}, answer);
  stream->write(out, 0, {.reasoning = "look."}, answer);
  stream->write(out, 0, {.content = "I "}, answer);
  stream->write(out, 0, {.content = "look."}, answer);
  stream->write(out, 0, {.tool_calls = {{.index = 0, .id = "call_1", .name = "weather"}}}, answer);
  stream->write(out, 0, {.tool_calls = {{.index = 0, .arguments = "{\"city\": "}}}, answer);
  stream->write(out, 0, {.tool_calls = {{.index = 0, .arguments = "\"Rome\"}"}}}, answer);
  answer.finish_reason = FinishReason::stop;
  stream->write(out, 0, {}, answer);
  stream->end(out);
  Written written;
  for (size_t at = 0; (at = out.find("data: ", at)) != out.npos;) {
    const size_t end = out.find("\n\n", at);
    written.events.push_back(Json::parse(out.substr(at + 6, end - at - 6)));
    const std::string type = written.events.back()["type"];
    if (written.types.empty() || written.types.back() != type) written.types.push_back(type);
    at = end;
  }
  const ChatMessage message{
      .reasoning = "Let me look.",
      .content = "I look.",
      .tool_calls = {{.id = "call_1", .name = "weather", .arguments = "{\"city\": \"Rome\"}"}}};
  written.whole = Json::parse(endpoint.make_writer(context)->whole({output}, {message}));
  return written;
}

// "Useful in instances where characters are represented by multiple tokens and their byte
// representations must be combined" (OpenAI's reference of chat completions, logprobs.content).
TEST(Writers, TokensHaveTheBytesThatMakeTheText) {
  const Tokenizer tokenizer(NANOVLLM_SOURCE_DIR "/models/demo");
  const std::string text = "23 \u65e5\U0001f600";
  std::vector<PositionLogprobs> positions;
  for (const int32_t id : tokenizer.encode(text)) positions.push_back({{.token_id = id}});
  const Json json = LogprobsJson{&tokenizer}.chat(positions);
  std::string joined;
  for (const Json& token : json["content"])
    for (const int byte : token["bytes"]) joined += static_cast<char>(byte);
  EXPECT_EQ(joined, text);
}

// lm-eval's is_greedy (lm_eval/models/openai_completions.py): a token's log probability is the
// largest of its position's. The names of tokens that are part of a character are the same.
TEST(Writers, TokensOfOneTextAreTheLikeliestOfThem) {
  const Tokenizer tokenizer(NANOVLLM_SOURCE_DIR "/models/demo");
  const std::vector<int32_t> bytes = tokenizer.encode("\u65e5");
  ASSERT_EQ(bytes.size(), 3u);
  const std::vector<PositionLogprobs> positions{
      {{.token_id = bytes[0], .logprob = -0.5f}, {.token_id = bytes[1], .logprob = -2}},
      {{.token_id = bytes[1], .logprob = -2}, {.token_id = bytes[0], .logprob = -0.5f}}};
  size_t offset = 0;
  const Json json = LogprobsJson{&tokenizer}.completion({bytes[0], bytes[1]}, positions, offset);
  for (const Json& candidates : json["top_logprobs"])
    EXPECT_EQ(candidates, (Json{{"\ufffd", -0.5}}));
}

TEST(Writers, AMessageThatThinksAndCallsATool) {
  const Written written = write("/v1/messages");
  const std::vector<std::string> block = {"content_block_start", "content_block_delta",
                                          "content_block_stop"};
  std::vector<std::string> expected = {"message_start", "ping"};
  for (int i = 0; i < 3; ++i) expected.insert(expected.end(), block.begin(), block.end());
  expected.insert(expected.end(), {"message_delta", "message_stop"});
  EXPECT_EQ(written.types, expected);
  Json thinking, text, tool;
  std::string json;
  for (const Json& event : written.events) {
    if (event["type"] == "content_block_start") {
      (event["index"] == 0 ? thinking : event["index"] == 1 ? text : tool) = event["content_block"];
    }
    if (event["type"] == "content_block_delta" && event["delta"]["type"] == "input_json_delta")
      json += event["delta"]["partial_json"].get<std::string>();
  }
  EXPECT_EQ(thinking, Json::parse(R"({"type": "thinking", "thinking": "", "signature": ""})"));
  EXPECT_EQ(text, Json::parse(R"({"type": "text", "text": ""})"));
  EXPECT_EQ(tool,
            Json::parse(R"({"type": "tool_use", "id": "call_1", "name": "weather", "input": {}})"));
  EXPECT_EQ(Json::parse(json), Json::parse(R"({"city": "Rome"})"));
  EXPECT_EQ(written.events[written.events.size() - 2]["delta"]["stop_reason"], "tool_use");
  EXPECT_EQ(written.whole["content"], Json::parse(R"([
    {"type": "thinking", "thinking": "Let me look.", "signature": ""},
    {"type": "text", "text": "I look."},
    {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Rome"}}])"));
  EXPECT_EQ(written.whole["stop_reason"], "tool_use");
}

TEST(Writers, AResponseThatReasonsAndCallsAFunction) {
  const Written written = write("/v1/responses");
  EXPECT_EQ(
      written.types,
      (std::vector<std::string>{
          "response.created", "response.in_progress",
          //
          "response.output_item.added", "response.content_part.added",
          "response.reasoning_text.delta", "response.reasoning_text.done",
          "response.content_part.done", "response.output_item.done",
          //
          "response.output_item.added", "response.content_part.added", "response.output_text.delta",
          "response.output_text.done", "response.content_part.done", "response.output_item.done",
          //
          "response.output_item.added", "response.function_call_arguments.delta",
          "response.function_call_arguments.done", "response.output_item.done",
          "response.completed"}));
  for (size_t i = 0; i < written.events.size(); ++i)
    EXPECT_EQ(written.events[i]["sequence_number"], i);
  const Json& output = written.whole["output"];
  EXPECT_EQ(output, written.events.back()["response"]["output"]);
  ASSERT_EQ(output.size(), 3u);
  EXPECT_EQ(output[0]["type"], "reasoning");
  EXPECT_EQ(output[0]["content"][0]["text"], "Let me look.");
  EXPECT_EQ(output[1]["content"][0]["text"], "I look.");
  EXPECT_EQ(output[2]["type"], "function_call");
  EXPECT_EQ(output[2]["call_id"], "call_1");
  EXPECT_EQ(output[2]["name"], "weather");
  EXPECT_EQ(Json::parse(output[2]["arguments"].get<std::string>()),
            Json::parse(R"({"city": "Rome"})"));
  EXPECT_EQ(output[2]["status"], "completed");
}

}  // namespace
}  // namespace nanovllm::server
