// Llama 3.1 and 3.2: the answer is {"name": "f", "parameters": {...}}, several with "; ", a comma
// or white space between them, perhaps behind <|python_tag|>. An object that calls none of the
// tools is an answer in JSON.
#include "chat/calls/json_scanner.h"

namespace nanovllm {
namespace {

class LlamaReader final : public CallReader {
 public:
  explicit LlamaReader(std::span<const Tool> tools) : tools_(tools), call_(tools) {}

  Step take(char c, CallSink& sink) override {
    if (is_space(c) && state_ != call) return Step::more;
    if (state_ == after && (c == ';' || c == ',')) {
      state_ = before;
      return Step::more;
    }
    if (state_ != call) call_ = JsonCall(tools_);
    state_ = call;
    const Step step = call_.take(c, sink);
    if (step != Step::last) return step;
    state_ = after;
    return Step::more;
  }
  bool finish(CallSink&) override { return state_ == after; }

 private:
  std::span<const Tool> tools_;
  enum { before, call, after } state_ = before;
  JsonCall call_;
};

}  // namespace

std::unique_ptr<CallReader> make_llama_reader(std::string_view, std::span<const Tool> tools) {
  return std::make_unique<LlamaReader>(tools);
}

}  // namespace nanovllm
