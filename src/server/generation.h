// A generation on its way to its client: outputs of the engine in, what the endpoint's writer makes
// of them out. Belongs to the I/O thread, but for whole().
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "chat/chat_parser.h"
#include "chat/reasoning.h"
#include "server/answer_writer.h"
#include "server/endpoints.h"
#include "server/http/http.h"

namespace nanovllm::server {

/// One choice of a chat, on its way from text to message.
struct ChatChoice {
  ChatParser parser;
  std::optional<ReasoningTokens> reasoning_tokens;
};

class Generation {
 public:
  /// `prompts` are the token ids of each prompt; choice p * n + i is answer i of prompt p.
  /// `headers` go with every answer.
  Generation(const GenerationEndpoint& endpoint, GenerationRequest request, std::string id,
             std::vector<std::vector<int32_t>> prompts, std::shared_ptr<Exchange> exchange,
             Headers headers, const Tokenizer* tokenizer, const AnswerOptions& options);

  /// News of prompt `p`. A stream begins with the first; where a whole answer has come,
  /// is_complete() says so.
  void take(size_t p, RequestOutput& output);
  /// The body of the whole answer; on any thread, while nothing but fail() is called.
  std::string whole() { return writer_->whole(whole_, messages_); }
  void respond(std::string&& body);
  /// The engine took none of it, or has failed: the error is the answer, or the end of its stream.
  void fail(int status, const std::string& message, const std::string& param = {});
  /// `callback` runs once if the client goes away before the answer is complete.
  void watch(std::function<void()> callback);
  /// Shows whoever closes idle connections that the stream lives. One that waits for its first
  /// token begins with the second call: until then a refusal has its status.
  void keep_alive();

  bool is_complete() const { return !request_.stream && !is_done_ && unfinished_ == 0; }
  bool is_done() const { return is_done_; }
  size_t num_logprobs() const;
  const GenerationSummary& summary() const { return summary_; }
  const std::vector<std::string>& ignored_fields() const { return request_.ignored; }
  std::vector<int64_t> engine_ids;  ///< of the prompts

 private:
  size_t choice_index(size_t p, const CompletionOutput& answer) const {
    return p * static_cast<size_t>(request_.params.n) + static_cast<size_t>(answer.index);
  }
  void echo(size_t p, CompletionOutput& answer);
  ChatChoice& choice_of(size_t choice);
  ChatDelta parsed(size_t choice, const CompletionOutput& answer);
  void stream(size_t p, RequestOutput& output);
  std::string begin_stream();
  void end_stream(std::string_view events);

  const GenerationEndpoint& endpoint_;
  const GenerationRequest request_;
  const std::vector<std::vector<int32_t>> prompts_;
  std::shared_ptr<Exchange> exchange_;
  Headers headers_;
  GenerationSummary summary_;
  std::unique_ptr<AnswerWriter> writer_;
  std::vector<RequestOutput> whole_;   // by prompt; in a stream their log probabilities alone
  std::vector<ChatMessage> messages_;  // of a whole answer, by choice
  const Tokenizer* tokenizer_;
  std::vector<std::optional<ChatChoice>> choices_;  // of a chat
  std::vector<bool> has_begun_;                     // choices whose echo has been made
  size_t unfinished_;
  bool is_streaming_ = false, has_waited_ = false, is_done_ = false;
};

}  // namespace nanovllm::server
