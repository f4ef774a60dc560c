// Request: what the engine keeps of one request from add_request() to its last output. It owns the
// sequences of its answers, which share the blocks of their prompt through the prefix cache.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "nanovllm/params.h"

#include "engine/scheduler/sequence.h"
#include "engine/text_stream.h"

namespace nanovllm {

/// One answer: its sequence, its text, and how much of both has been reported.
struct Answer {
  Sequence sequence;
  std::unique_ptr<TextStream> text;        // null: no detokenisation
  std::optional<std::string> stop_string;  // that ended it
  std::vector<PositionLogprobs> logprobs;
  bool has_ended = false;                         // and is in no plan in flight
  size_t reported_text = 0, reported_tokens = 0;  // for OutputKind::delta
  bool reported_end = false;
};

struct Request {
  int64_t id = 0;
  OutputKind output_kind = OutputKind::cumulative;
  std::chrono::steady_clock::time_point added;
  RequestMetrics metrics;
  std::vector<PositionLogprobs> prompt_logprobs;  // of answer 0
  std::shared_ptr<const Grammar> grammar;         // of the answers' matchers; null: none
  // n of them. Their addresses are fixed: the scheduler's queues and plans lead to them.
  std::vector<Answer> answers;
  bool reported_prompt = false;
  bool has_news = false;  // an answer got a token or ended in this step

  Answer& answer_of(const Sequence& sequence) {
    return answers[static_cast<size_t>(sequence.index)];
  }
  bool has_ended() const { return std::ranges::all_of(answers, &Answer::has_ended); }
};

/// The report of a request: its state or, with OutputKind::delta, what is new since the
/// last report.
RequestOutput report(Request& request, bool finished);

}  // namespace nanovllm
