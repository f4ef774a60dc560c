// How one endpoint writes its answers. A Generation is the way from the engine's outputs to the
// client for all of them; the writer has the endpoint's JSON and events.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "nanovllm/tokenizer.h"

#include "chat/message.h"
#include "server/openai/request.h"

namespace nanovllm::server {

/// A generation's totals, for `usage`, the log and the metrics.
struct GenerationSummary {
  std::string id, model;
  int64_t prompt_tokens = 0, completion_tokens = 0, cached_tokens = 0, reasoning_tokens = 0;
  int status = 200;
};

/// The server's options that answers depend on.
struct AnswerOptions {
  bool prompt_details = false;     ///< usage tells of cached tokens
  bool reasoning_content = false;  ///< reasoning under its older name
  std::string fingerprint{};       ///< OpenAI's system_fingerprint
};

/// The sources of a writer; they outlive it.
struct WriterContext {
  const GenerationRequest& request;
  const std::vector<std::vector<int32_t>>& prompts;  ///< token ids
  const GenerationSummary& summary;                  ///< as of now
  int64_t created = 0;                               ///< seconds since 1970
  const Tokenizer* tokenizer = nullptr;              ///< may be null
  AnswerOptions options{};
};

/// Belongs to the I/O thread, but for whole(), which may run on the pool. Events are appended to
/// `out`.
class AnswerWriter {
 public:
  virtual ~AnswerWriter() = default;

  /// The events that a stream begins with.
  virtual void begin(std::string& /*out*/) {}
  /// News of a choice: what its text has brought, and the rest of it.
  virtual void write(std::string& out, size_t choice, const ChatDelta& delta,
                     const CompletionOutput& answer) = 0;
  /// All answers have ended.
  virtual void end(std::string& out) = 0;
  /// The stream ends with this error.
  virtual void fail(std::string& out, int status, std::string_view message,
                    std::string_view param) = 0;
  /// An event that says nothing, by which proxies and clients see that a stream lives.
  virtual std::string_view keep_alive() const { return ": keep-alive\n\n"; }

  /// The body of a whole answer, of the outputs of all prompts; `messages` are the choices'.
  virtual std::string whole(const std::vector<RequestOutput>& outputs,
                            const std::vector<ChatMessage>& messages) = 0;
};

}  // namespace nanovllm::server
