#include "engine/request.h"

#include "core/seconds.h"

namespace nanovllm {
namespace {

/// The answer's state, or with `delta` what is new since the last report.
CompletionOutput report(Answer& answer, bool delta) {
  const Sequence& sequence = answer.sequence;
  CompletionOutput out;
  out.index = sequence.index;
  if (answer.has_ended) {
    out.finish_reason = sequence.finish_reason;
    out.stop_reason = sequence.stop_reason;
    // Where a stop string and the limit of tokens are met by the same token, the text decides.
    if (answer.stop_string && sequence.finish_reason == FinishReason::length) {
      out.finish_reason = FinishReason::stop;
      out.stop_reason = *answer.stop_string;
    }
  }
  const size_t text_from = delta ? answer.reported_text : 0,
               tokens_from = delta ? answer.reported_tokens : 0;
  out.token_ids.assign(
      sequence.token_ids.begin() + sequence.num_prompt_tokens + static_cast<int64_t>(tokens_from),
      sequence.token_ids.end());
  if (answer.text)
    out.text = answer.text->text().substr(text_from, answer.text->visible() - text_from);
  out.logprobs.assign(
      answer.logprobs.begin() + static_cast<int64_t>(std::min(tokens_from, answer.logprobs.size())),
      answer.logprobs.end());
  answer.reported_tokens = static_cast<size_t>(sequence.num_generated());
  if (answer.text) answer.reported_text = answer.text->visible();
  answer.reported_end = answer.has_ended;
  return out;
}

}  // namespace

RequestOutput report(Request& request, bool finished) {
  const bool delta = request.output_kind == OutputKind::delta;
  RequestMetrics& metrics = request.metrics;
  const Sequence& first = request.answers[0].sequence;
  if (finished) metrics.total_time = seconds_since(request.added);
  metrics.num_cached_tokens = first.num_cached_tokens;
  metrics.num_preemptions = 0;
  RequestOutput out;
  out.request_id = request.id;
  out.finished = finished;
  if (!delta || !request.reported_prompt) {
    out.prompt_token_ids.assign(first.token_ids.begin(),
                                first.token_ids.begin() + first.num_prompt_tokens);
    out.prompt_logprobs = request.prompt_logprobs;
    request.reported_prompt = true;
  }
  for (Answer& answer : request.answers) {
    const Sequence& sequence = answer.sequence;
    metrics.num_preemptions += sequence.num_preemptions;
    if (out.error.empty()) {
      out.error = sequence.error;
      out.failure = sequence.failure;
    }
    // One that ended while a step of its is in flight is reported when that step is processed.
    const bool is_new = answer.has_ended ? !answer.reported_end
                                         : !sequence.is_finished() &&
                                               answer.reported_tokens <
                                                   static_cast<size_t>(sequence.num_generated());
    if (!delta || is_new) out.outputs.push_back(report(answer, delta));
  }
  out.metrics = metrics;
  return out;
}

}  // namespace nanovllm
