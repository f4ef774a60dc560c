#include "server/generation.h"

#include <ctime>
#include <utility>

#include <fmt/format.h>

#include "server/http/error_body.h"

namespace nanovllm::server {

Generation::Generation(const GenerationEndpoint& endpoint, GenerationRequest request,
                       std::string id, std::vector<std::vector<int32_t>> prompts,
                       std::shared_ptr<Exchange> exchange, Headers headers,
                       const Tokenizer* tokenizer, const AnswerOptions& options)
    : endpoint_(endpoint),
      request_(std::move(request)),
      prompts_(std::move(prompts)),
      exchange_(std::move(exchange)),
      headers_(std::move(headers)),
      whole_(prompts_.size()),
      tokenizer_(tokenizer),
      choices_(prompts_.size() * static_cast<size_t>(request_.params.n)),
      has_begun_(choices_.size()),
      unfinished_(prompts_.size()) {
  summary_.id = std::move(id);
  summary_.model = request_.model;
  for (const auto& prompt : prompts_) summary_.prompt_tokens += std::ssize(prompt);
  writer_ = endpoint_.make_writer({.request = request_,
                                   .prompts = prompts_,
                                   .summary = summary_,
                                   .created = static_cast<int64_t>(std::time(nullptr)),
                                   .tokenizer = tokenizer,
                                   .options = options});
}

void Generation::take(size_t p, RequestOutput& output) {
  if (is_done_) return;
  for (const CompletionOutput& answer : output.outputs)
    summary_.completion_tokens += std::ssize(answer.token_ids);
  if (output.finished) {
    --unfinished_;
    summary_.cached_tokens += output.metrics.num_cached_tokens;
    if (output.failure != RequestFailure::none)
      return fail(output.failure == RequestFailure::deadline ? 503 : 500, output.error);
    if (!output.error.empty()) return fail(400, output.error);  // its structure cannot go on
  }
  if (request_.stream) return stream(p, output);
  whole_[p] = std::move(output);
  for (CompletionOutput& answer : whole_[p].outputs) echo(p, answer);
  if (unfinished_ > 0) return;
  for (const RequestOutput& whole : whole_) {
    for (const CompletionOutput& answer : whole.outputs) {
      const ChatDelta delta = parsed(messages_.size(), answer);
      messages_.emplace_back().add(delta);
    }
  }
}

void Generation::respond(std::string&& body) {
  if (is_done_) return;
  is_done_ = true;
  exchange_->respond({.body = std::move(body), .headers = std::move(headers_)});
  exchange_.reset();
}

/// Of the whole answer.
size_t Generation::num_logprobs() const {
  size_t count = 0;
  const auto add = [&](const std::vector<PositionLogprobs>& positions) {
    for (const PositionLogprobs& position : positions) count += position.size();
  };
  for (const RequestOutput& output : whole_) {
    add(output.prompt_logprobs);
    for (const CompletionOutput& answer : output.outputs) add(answer.logprobs);
  }
  return count;
}

void Generation::stream(size_t p, RequestOutput& output) {
  std::string events = begin_stream();
  if (!output.prompt_logprobs.empty()) whole_[p].prompt_logprobs = output.prompt_logprobs;
  for (CompletionOutput& answer : output.outputs) {
    echo(p, answer);
    const size_t choice = choice_index(p, answer);
    writer_->write(events, choice, parsed(choice, answer), answer);
  }
  if (unfinished_ > 0) return exchange_->write(events);
  writer_->end(events);
  end_stream(events);
}

/// Puts the prompt before the beginning of an answer.
void Generation::echo(size_t p, CompletionOutput& answer) {
  if (request_.prompt_alone)
    answer = {.index = answer.index, .finish_reason = FinishReason::length};
  if (!request_.echo || has_begun_[choice_index(p, answer)]) return;
  has_begun_[choice_index(p, answer)] = true;
  const auto& ids = prompts_[p];
  const auto& logprobs = whole_[p].prompt_logprobs;
  if (const auto* given = std::get_if<std::string>(&request_.prompts[p].value))
    answer.text.insert(0, *given);
  else if (tokenizer_)
    answer.text.insert(0, tokenizer_->decode(ids, false));
  answer.token_ids.insert(answer.token_ids.begin(), ids.begin(), ids.end());
  answer.logprobs.insert(answer.logprobs.begin(), logprobs.begin(), logprobs.end());
}

ChatChoice& Generation::choice_of(size_t choice) {
  auto& made = choices_[choice];
  if (made) return *made;
  ChatParserOptions options = request_.parser;
  options.id_seed = std::hash<std::string>{}(fmt::format("{} {}", summary_.id, choice));
  made.emplace(ChatChoice{ChatParser(request_.format, std::move(options)), {}});
  if (request_.format.reasoning && tokenizer_)
    made->reasoning_tokens.emplace(*request_.format.reasoning, request_.parser.is_reasoning,
                                   *tokenizer_);
  return *made;
}

/// Takes the news of a choice's text apart.
ChatDelta Generation::parsed(size_t choice, const CompletionOutput& answer) {
  if (!request_.is_chat) return {.content = answer.text};
  ChatChoice& state = choice_of(choice);
  if (state.reasoning_tokens) {
    const int64_t before = state.reasoning_tokens->count();
    for (const int32_t id : answer.token_ids) state.reasoning_tokens->add(id);
    summary_.reasoning_tokens += state.reasoning_tokens->count() - before;
  }
  ChatDelta delta = state.parser.add(answer.text);
  if (answer.finished()) delta.add(state.parser.finish());
  if (!request_.include_reasoning) delta.reasoning.clear();
  return delta;
}

/// The events that a stream begins with; none where it has begun.
std::string Generation::begin_stream() {
  std::string events;
  if (std::exchange(is_streaming_, true)) return events;
  exchange_->begin_stream(headers_);
  writer_->begin(events);
  return events;
}

void Generation::end_stream(std::string_view events) {
  is_done_ = true;
  exchange_->write(events);
  exchange_->end_stream();
  exchange_.reset();
}

void Generation::fail(int status, const std::string& message, const std::string& param) {
  if (is_done_) return;
  summary_.status = status;
  if (is_streaming_) {
    std::string events;
    writer_->fail(events, status, message, param);
    return end_stream(events);
  }
  is_done_ = true;
  HttpResponse response = error_response(status, message, param, endpoint_.error_style);
  response.headers.insert(response.headers.end(), headers_.begin(), headers_.end());
  exchange_->respond(std::move(response));
  exchange_.reset();
}

void Generation::watch(std::function<void()> callback) {
  if (is_done_) return;
  const std::shared_ptr<Exchange> exchange = exchange_;  // the callback may end this generation
  exchange->on_abandoned(std::move(callback));
}

void Generation::keep_alive() {
  if (!request_.stream || is_done_) return;
  if (!is_streaming_ && !std::exchange(has_waited_, true)) return;
  std::string events = begin_stream();
  exchange_->write(events += writer_->keep_alive());
}

}  // namespace nanovllm::server
