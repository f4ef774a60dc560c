// Hermes, Qwen2.5, Qwen3: <tool_call>{"name": "f", "arguments": {...}}</tool_call>.
#include "chat/calls/json_scanner.h"

namespace nanovllm {
namespace {

constexpr std::string_view kEnd = "</tool_call>";

class HermesReader final : public CallReader {
 public:
  Step take(char c, CallSink& sink) override {
    if (is_space(c) && state_ != call) return end_.empty() ? Step::more : Step::refused;
    if (state_ == before) state_ = call;
    if (state_ == call) {
      const Step step = call_.take(c, sink);
      if (step != Step::last) return step;
      state_ = after;
      return Step::more;
    }
    // Some models leave the end mark out: what else follows is text.
    end_ += c;
    if (end_ == kEnd) return Step::last;
    return kEnd.starts_with(end_) ? Step::more : Step::refused;
  }
  // An end mark that max_tokens has cut is no text.
  bool finish(CallSink&) override { return state_ == after && kEnd.starts_with(end_); }

 private:
  enum { before, call, after } state_ = before;
  JsonCall call_;
  std::string end_;
};

}  // namespace

std::unique_ptr<CallReader> make_hermes_reader(std::string_view, std::span<const Tool>) {
  return std::make_unique<HermesReader>();
}

}  // namespace nanovllm
