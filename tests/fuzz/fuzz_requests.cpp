// Any bytes as a body for each endpoint that generates: what is accepted is in range, what is
// refused is an Error that fits its envelope; and what the writers make of an answer is valid JSON.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include <nlohmann/json.hpp>

#include "engine/request_checks.h"
#include "server/endpoints.h"

namespace {

using namespace nanovllm;
using namespace nanovllm::server;

void require(bool condition) {
  if (!condition) std::abort();
}

void check_events(const std::string& events) {
  for (size_t at = 0; (at = events.find("data: ", at)) != events.npos;) {
    const size_t end = events.find("\n\n", at);
    require(end != events.npos);
    const std::string_view data = std::string_view(events).substr(at + 6, end - at - 6);
    if (data != "[DONE]") parse_json(data, "event", ErrorKind::engine);
    at = end;
  }
}

/// An answer of two pieces, streamed and whole.
void write_answers(const GenerationEndpoint& endpoint, const GenerationRequest& request,
                   const std::string& text) {
  const std::vector<std::vector<int32_t>> prompts(1, {1, 2});
  const GenerationSummary summary{.id = "id_1", .model = request.model};
  const WriterContext context{.request = request, .prompts = prompts, .summary = summary};
  RequestOutput output;
  output.outputs.push_back({.text = text, .token_ids = {5}});
  CompletionOutput& answer = output.outputs.front();
  if (request.params.logprobs) answer.logprobs = {{{5, -1.0F, 1}, {6, -2.0F, 2}}};
  std::string events;
  const auto stream = endpoint.make_writer(context);
  stream->begin(events);
  stream->write(events, 0, {.reasoning = text}, answer);
  stream->write(events, 0, {.content = text}, answer);
  stream->write(events, 0, {.tool_calls = {{.id = "a", .name = text}, {.arguments = text}}},
                answer);
  answer.finish_reason = FinishReason::stop;
  answer.stop_reason = text;
  stream->write(events, 0, {}, answer);
  stream->end(events);
  check_events(events);
  events.clear();
  const auto failing = endpoint.make_writer(context);
  failing->write(events, 0, {.content = text}, output.outputs.front());
  failing->fail(events, 500, text, "");
  check_events(events);
  parse_json(endpoint.make_writer(context)->whole({output}, {{.reasoning = text, .content = text}}),
             "answer", ErrorKind::engine);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  constexpr const char* kPaths[] = {"/v1/chat/completions", "/v1/completions", "/v1/responses",
                                    "/v1/messages"};
  const GenerationEndpoint& endpoint = *find_generation_endpoint(kPaths[data[0] % 4]);
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  RequestDefaults defaults;
  defaults.model_names = {"demo"};
  defaults.max_model_len = 100;
  Json body;
  try {
    body = parse_json(text, "request body", ErrorKind::invalid_argument);
    const GenerationRequest request = endpoint.read(body, defaults);
    require(request.model == "demo");
    require(request.is_chat != !request.prompts.empty());
    require(!request.max_tokens || *request.max_tokens >= 1);
    if (problem_with(request.params, 1000)) return 0;
    require(request.params.n >= 1 && request.params.n <= 128);
    // Completions have neither reasoning nor calls.
    write_answers(endpoint, request,
                  request.is_chat ? request.conversation.messages.dump().substr(0, 50) : "");
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::invalid_argument);
    const HttpResponse response =
        error_response(400, error.what(), field_at_fault(body, error.what()), endpoint.error_style);
    require(response.body.size() < 8192);
    parse_json(response.body, "error", ErrorKind::engine);
  } catch (const UnknownModel&) {
  }
  return 0;
}
