#include "server/openai/answer.h"

#include <algorithm>
#include <cmath>
#include <ctime>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "server/http/error_body.h"

namespace nanovllm::server {
namespace {

constexpr double kLowestLogprob = -9999.0;  // JSON has no -inf; vLLM's floor

const char* reason(FinishReason r) { return r == FinishReason::none ? nullptr : to_string(r); }

std::string dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

double number(float logprob) {
  return std::isfinite(logprob) ? std::max<double>(logprob, kLowestLogprob) : kLowestLogprob;
}

/// vLLM's: null for EOS and length, a token's id as a number, a stop string as a text.
Json stop_reason(const std::string& text, const SamplingParams& params) {
  if (text.empty()) return nullptr;
  for (const int64_t id : params.stop_token_ids)
    if (std::to_string(id) == text) return id;
  return text;
}

}  // namespace

Generation::Generation(GenerationRequest request, std::string id,
                       std::vector<std::vector<int32_t>> prompts,
                       std::shared_ptr<Exchange> exchange, const Tokenizer* tokenizer,
                       bool prompt_details)
    : request_(std::move(request)),
      prompts_(std::move(prompts)),
      exchange_(std::move(exchange)),
      tokenizer_(tokenizer),
      prompt_details_(prompt_details),
      created_(static_cast<int64_t>(std::time(nullptr))),
      whole_(prompts_.size()),
      has_role_(prompts_.size() * static_cast<size_t>(request_.params.n)),
      text_offsets_(has_role_.size()),
      unfinished_(prompts_.size()) {
  summary_.id = std::move(id);
  summary_.model = request_.model;
  for (const auto& prompt : prompts_) summary_.prompt_tokens += std::ssize(prompt);
  head_ = "{\"id\":";
  append_json(head_, summary_.id);
  head_ += fmt::format(",\"object\":\"{}\",\"created\":{},\"model\":",
                       request_.is_chat ? "chat.completion.chunk" : "text_completion", created_);
  append_json(head_, request_.model);
}

void Generation::take(size_t p, RequestOutput& output) {
  if (is_done_) return;
  for (const CompletionOutput& answer : output.outputs)
    summary_.completion_tokens += std::ssize(answer.token_ids);
  if (output.finished) {
    --unfinished_;
    summary_.cached_tokens += output.metrics.num_cached_tokens;
    summary_.seconds = std::max(summary_.seconds, output.metrics.total_time);
    if (!output.error.empty()) {
      const bool broken = std::ranges::count(output.outputs, FinishReason::error,
                                             &CompletionOutput::finish_reason) > 0;
      return fail(broken ? 500 : 503, output.error);  // 503: its deadline has passed
    }
  }
  if (request_.stream) return stream(p, output);
  whole_[p] = std::move(output);
  if (unfinished_ == 0) respond();
}

void Generation::fail(int status, const std::string& message, const std::string& param) {
  if (is_done_) return;
  is_done_ = true;
  summary_.status = status;
  if (is_streaming_) {
    write_event(error_body(status, message, param));
    exchange_->write("data: [DONE]\n\n");
    exchange_->end_stream();
  } else {
    exchange_->respond(error_response(status, message, param));
  }
  exchange_.reset();
}

void Generation::watch(std::function<void()> callback) {
  if (is_done_) return;
  const std::shared_ptr<Exchange> exchange = exchange_;  // the callback may end this generation
  exchange->on_abandoned(std::move(callback));
}

void Generation::keep_alive() {
  if (is_streaming_ && !is_done_) exchange_->write(": keep-alive\n\n");
}

// -- Streams

void Generation::write_event(const std::string& json) {
  exchange_->write("data: " + json + "\n\n");
}

void Generation::begin_stream() {
  if (is_streaming_) return;
  is_streaming_ = true;
  exchange_->begin_stream({});
}

std::string Generation::chunk(size_t choice, const std::string& body, const std::string& logprobs,
                              const char* finish_reason, const std::string& stop) {
  std::string json = head_ + fmt::format(
                                 ",\"choices\":[{{\"index\":{},{},\"logprobs\":{},"
                                 "\"finish_reason\":",
                                 choice, body, logprobs);
  json += finish_reason ? fmt::format("\"{}\"", finish_reason) : "null";
  if (finish_reason) json += ",\"stop_reason\":" + dump(stop_reason(stop, request_.params));
  json += "}]";
  if (request_.continuous_usage) json += ",\"usage\":" + usage();
  return json + "}";
}

void Generation::stream(size_t p, RequestOutput& output) {
  begin_stream();
  for (const CompletionOutput& answer : output.outputs) {
    const size_t choice =
        p * static_cast<size_t>(request_.params.n) + static_cast<size_t>(answer.index);
    if (request_.is_chat && !has_role_[choice])
      write_event(chunk(choice, "\"delta\":{\"role\":\"assistant\",\"content\":\"\"}", "null",
                        nullptr, ""));
    has_role_[choice] = true;
    const bool has_logprobs = request_.params.logprobs && !answer.logprobs.empty();
    if (!answer.text.empty() || has_logprobs || request_.return_token_ids) {
      std::string body = request_.is_chat ? "\"delta\":{\"content\":" : "\"text\":";
      append_json(body, answer.text);
      if (request_.is_chat) body += "}";
      if (request_.return_token_ids) body += ",\"token_ids\":" + dump(Json(answer.token_ids));
      std::string logprobs = "null";
      if (has_logprobs)
        logprobs = dump(request_.is_chat ? chat_logprobs(answer.logprobs)
                                         : completion_logprobs(answer.token_ids, answer.logprobs,
                                                               text_offsets_[choice]));
      write_event(chunk(choice, body, logprobs, nullptr, ""));
    }
    if (answer.finished())
      write_event(chunk(choice, request_.is_chat ? "\"delta\":{}" : "\"text\":\"\"", "null",
                        reason(answer.finish_reason), answer.stop_reason));
  }
  if (unfinished_ > 0) return;
  if (request_.include_usage) write_event(head_ + ",\"choices\":[],\"usage\":" + usage() + "}");
  is_done_ = true;
  exchange_->write("data: [DONE]\n\n");
  exchange_->end_stream();
  exchange_.reset();
}

std::string Generation::usage() const {
  std::string json = fmt::format(
      "{{\"prompt_tokens\":{},\"total_tokens\":{},\"completion_tokens\":{}", summary_.prompt_tokens,
      summary_.prompt_tokens + summary_.completion_tokens, summary_.completion_tokens);
  if (prompt_details_)
    json +=
        fmt::format(",\"prompt_tokens_details\":{{\"cached_tokens\":{}}}", summary_.cached_tokens);
  return json + "}";
}

// -- Whole answers

void Generation::respond() {
  Json choices = Json::array();
  for (size_t p = 0; p < whole_.size(); ++p)
    for (const CompletionOutput& answer : whole_[p].outputs)
      choices.push_back(choice_json(p, whole_[p], answer));
  Json body = {{"id", summary_.id},
               {"object", request_.is_chat ? "chat.completion" : "text_completion"},
               {"created", created_},
               {"model", request_.model},
               {"choices", std::move(choices)},
               {"usage", Json::parse(usage())}};
  is_done_ = true;
  exchange_->respond({.body = dump(body)});
  exchange_.reset();
}

Json Generation::choice_json(size_t p, const RequestOutput& output,
                             const CompletionOutput& answer) const {
  Json choice = {{"index", static_cast<int64_t>(p) * request_.params.n + answer.index}};
  if (request_.is_chat) {
    choice["message"] = {{"role", "assistant"}, {"content", answer.text}};
    choice["logprobs"] = nullptr;
    if (request_.params.logprobs) choice["logprobs"] = chat_logprobs(answer.logprobs);
  } else {
    std::string text = answer.text;
    if (request_.echo) {
      const auto* given = std::get_if<std::string>(&request_.prompts[p].value);
      if (given)
        text.insert(0, *given);
      else if (tokenizer_)
        text.insert(0, tokenizer_->decode(prompts_[p], false));
    }
    choice["text"] = std::move(text);
    choice["logprobs"] = nullptr;
    if (request_.params.logprobs) {
      size_t offset = 0;
      std::vector<int32_t> ids;
      std::vector<PositionLogprobs> positions;
      if (request_.echo) {
        ids = prompts_[p];
        positions = output.prompt_logprobs;
      }
      ids.insert(ids.end(), answer.token_ids.begin(), answer.token_ids.end());
      positions.insert(positions.end(), answer.logprobs.begin(), answer.logprobs.end());
      choice["logprobs"] = completion_logprobs(ids, positions, offset);
    }
  }
  choice["finish_reason"] = reason(answer.finish_reason);
  choice["stop_reason"] = stop_reason(answer.stop_reason, request_.params);
  if (request_.return_token_ids) {
    choice["token_ids"] = answer.token_ids;
    choice["prompt_token_ids"] = prompts_[p];
  }
  return choice;
}

std::string Generation::token_text(int32_t id) const {
  return tokenizer_ ? tokenizer_->decode(std::span(&id, 1), false) : fmt::format("token_id:{}", id);
}

Json Generation::chat_logprobs(const std::vector<PositionLogprobs>& positions) const {
  const auto entry = [this](const TokenLogprob& candidate) {
    const std::string text = token_text(candidate.token_id);
    return Json{{"token", text},
                {"logprob", number(candidate.logprob)},
                {"bytes", std::vector<int>(
                              reinterpret_cast<const unsigned char*>(text.data()),
                              reinterpret_cast<const unsigned char*>(text.data()) + text.size())}};
  };
  Json content = Json::array();
  for (const PositionLogprobs& position : positions) {
    Json token = entry(position.front());
    token["top_logprobs"] = Json::array();
    for (size_t i = 1; i < position.size(); ++i)
      token["top_logprobs"].push_back(entry(position[i]));
    content.push_back(std::move(token));
  }
  return {{"content", std::move(content)}};
}

// A prompt's first token has no log probability.
Json Generation::completion_logprobs(const std::vector<int32_t>& ids,
                                     const std::vector<PositionLogprobs>& positions,
                                     size_t& offset) const {
  Json tokens = Json::array(), logprobs = Json::array(), top = Json::array(),
       offsets = Json::array();
  for (size_t i = 0; i < ids.size() && i < positions.size(); ++i) {
    const std::string text = token_text(ids[i]);
    tokens.push_back(text);
    offsets.push_back(offset);
    offset += text.size();
    if (positions[i].empty()) {
      logprobs.push_back(nullptr);
      top.push_back(nullptr);
      continue;
    }
    logprobs.push_back(number(positions[i].front().logprob));
    Json candidates = Json::object();
    for (const TokenLogprob& candidate : positions[i])
      candidates[token_text(candidate.token_id)] = number(candidate.logprob);
    top.push_back(std::move(candidates));
  }
  return {{"text_offset", std::move(offsets)},
          {"token_logprobs", std::move(logprobs)},
          {"tokens", std::move(tokens)},
          {"top_logprobs", std::move(top)}};
}

}  // namespace nanovllm::server
