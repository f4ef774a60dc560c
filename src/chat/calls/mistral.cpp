// Mistral: [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...], and since 2025
// [TOOL_CALLS]f[ARGS]{...}, which may have [CALL_ID]... before [ARGS].
#include "chat/calls/json_scanner.h"

namespace nanovllm {
namespace {

class MistralReader final : public CallReader {
 public:
  Step take(char c, CallSink& sink) override {
    switch (state_) {
      case before:
        if (is_space(c)) return Step::more;
        if (c == '[') {
          state_ = list;
          return Step::more;
        }
        state_ = header;
        [[fallthrough]];
      case header:
        return take_header(c, sink);
      case arguments:
        return take_arguments(c, sink);
      case list:
        if (is_space(c)) return Step::more;
        call_ = JsonCall();
        state_ = in_list;
        [[fallthrough]];
      case in_list: {
        const Step step = call_.take(c, sink);
        if (step == Step::last) state_ = after_call;
        return step == Step::last ? Step::more : step;
      }
      case after_call:
        if (is_space(c)) return Step::more;
        if (c == ']') return Step::last;
        state_ = list;
        return c == ',' ? Step::more : Step::refused;
    }
    return Step::refused;
  }
  bool finish(CallSink&) override { return state_ == after_call; }

 private:
  /// The name and, perhaps, the call's id.
  Step take_header(char c, CallSink& sink) {
    constexpr std::string_view kId = "[CALL_ID]", kArguments = "[ARGS]";
    if (c != '{') {
      header_ += c;
      return header_.size() > 512 ? Step::refused : Step::more;
    }
    while (!header_.empty() && is_space(header_.back())) header_.pop_back();
    if (header_.ends_with(kArguments)) header_.resize(header_.size() - kArguments.size());
    header_.resize(std::min(header_.find(kId), header_.size()));
    while (!header_.empty() && is_space(header_.back())) header_.pop_back();
    if (header_.empty() || header_.find_first_of("[]{}\"\n") != header_.npos) return Step::refused;
    sink.begin_call(header_);
    state_ = arguments;
    return take_arguments(c, sink);
  }

  Step take_arguments(char c, CallSink& sink) {
    const Step step = scanner_.take(c);
    if (step == Step::more || step == Step::last) sink.add_arguments(std::string_view(&c, 1));
    if (step == Step::last) sink.end_call();
    return step;
  }

  enum { before, header, arguments, list, in_list, after_call } state_ = before;
  std::string header_;
  JsonScanner scanner_;
  JsonCall call_;
};

}  // namespace

std::unique_ptr<CallReader> make_mistral_reader(std::string_view, std::span<const Tool>) {
  return std::make_unique<MistralReader>();
}

}  // namespace nanovllm
