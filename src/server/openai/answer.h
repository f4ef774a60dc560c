// A generation on its way to its client: outputs of the engine in, JSON or events out. Belongs to
// the I/O thread.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "nanovllm/tokenizer.h"

#include "server/http/http.h"
#include "server/openai/request.h"

namespace nanovllm::server {

/// What ended, for the log and the metrics.
struct GenerationSummary {
  std::string id, model;
  int64_t prompt_tokens = 0, completion_tokens = 0, cached_tokens = 0;
  double seconds = 0;
  int status = 200;
};

class Generation {
 public:
  /// `prompts` are the token ids of each prompt; choice p * n + i is answer i of prompt p.
  Generation(GenerationRequest request, std::string id, std::vector<std::vector<int32_t>> prompts,
             std::shared_ptr<Exchange> exchange, const Tokenizer* tokenizer, bool prompt_details);

  /// News of prompt `p`. A stream begins with the first.
  void take(size_t p, RequestOutput& output);
  /// The engine took none of it, or has failed: the error is the answer, or the end of its stream.
  void fail(int status, const std::string& message, const std::string& param = {});
  /// `callback` runs once if the client goes away before the answer is complete.
  void watch(std::function<void()> callback);
  /// A comment, so that proxies and clients see that the stream lives.
  void keep_alive();

  bool is_done() const { return is_done_; }
  const GenerationSummary& summary() const { return summary_; }
  std::vector<int64_t> engine_ids;  ///< of the prompts

 private:
  void begin_stream();
  void write_event(const std::string& json);
  void stream(size_t p, RequestOutput& output);
  std::string chunk(size_t choice, const std::string& body, const std::string& logprobs,
                    const char* finish_reason, const std::string& stop_reason);
  std::string usage() const;
  void respond();
  Json choice_json(size_t p, const RequestOutput& output, const CompletionOutput& answer) const;
  Json chat_logprobs(const std::vector<PositionLogprobs>& positions) const;
  Json completion_logprobs(const std::vector<int32_t>& ids,
                           const std::vector<PositionLogprobs>& positions, size_t& offset) const;
  std::string token_text(int32_t id) const;

  const GenerationRequest request_;
  const std::vector<std::vector<int32_t>> prompts_;
  std::shared_ptr<Exchange> exchange_;
  const Tokenizer* tokenizer_;
  const bool prompt_details_;
  const int64_t created_;
  std::string head_;                  // what all chunks of a stream begin with
  std::vector<RequestOutput> whole_;  // by prompt, where the answer is one
  std::vector<bool> has_role_;        // choices whose first chunk has been sent
  std::vector<size_t> text_offsets_;  // of completions' logprobs, by choice
  size_t unfinished_;
  bool is_streaming_ = false, is_done_ = false;
  GenerationSummary summary_;
};

}  // namespace nanovllm::server
