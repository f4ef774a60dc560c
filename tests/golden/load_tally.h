// The requests and steps of which a run of the exactness fuzz was made.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <string>
#include <utility>

#include <fmt/ranges.h>

#include "nanovllm/llm.h"

#include "core/seconds.h"

namespace nanovllm {

class Stopwatch {
 public:
  /// Seconds since this was made, or since the last call.
  double lap() {
    const auto now = std::chrono::steady_clock::now(), before = std::exchange(last_, now);
    return to_seconds(now - before);
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

/// A step's tokens, as its outputs show them.
struct StepTokens {
  int64_t first = 0, later = 0;  // of requests that had none yet, and of others
  bool logprobs = false, filters = false, masks = false, grammars = false, micro_batches = false;
};

/// Requests, tokens and steps by their kinds. A step whose prompts are not at their ends yet shows
/// no token of theirs: one beside decodes counts as decodes.
struct Tally {
  // A decode step of that many rows at most; the kernels differ.
  static constexpr std::array<int64_t, 9> kRows{1, 2, 4, 8, 64, 96, 128, 256, 512};

  int64_t rounds = 0, requests = 0, tokens = 0, aborted = 0, preemptions = 0, hits = 0;
  int64_t tools = 0, failed = 0;               // of the requests that were drawn
  int64_t silent = 0, prompts = 0, mixed = 0;  // steps without tokens, of first ones alone, of both
  std::array<int64_t, kRows.size()> decodes{};
  int64_t micro_batches = 0, logprobs = 0, filters = 0, masks = 0, grammars = 0,
          plain = 0;                            // of the decode steps
  double alone = 0, opening = 0, together = 0;  // seconds

  void add(const StepTokens& step) {
    if (step.first + step.later == 0) ++silent;
    if (step.first > 0) ++(step.later > 0 ? mixed : prompts);
    if (step.first > 0 || step.later == 0) return;
    const auto bucket = std::lower_bound(kRows.begin(), kRows.end() - 1, step.later);
    ++decodes[static_cast<size_t>(bucket - kRows.begin())];
    micro_batches += step.micro_batches && step.later > 1;
    logprobs += step.logprobs;
    filters += step.filters;
    masks += step.masks;
    grammars += step.grammars;
    plain += !step.logprobs && !step.filters && !step.masks && !step.grammars;
  }
  void add(const RequestOutput& output) {
    ++requests;
    for (const CompletionOutput& answer : output.outputs) {
      aborted += answer.finish_reason == FinishReason::abort;
      tokens += std::ssize(answer.token_ids);
    }
  }
  void add(const EngineStats& stats) {
    ++rounds;
    preemptions += stats.preemptions;
    hits += stats.cached_prompt_tokens;
  }
  /// A fuzz that never preempts, hits or aborts proves little.
  bool proves() const { return preemptions > 0 && hits > 0 && aborted > 0; }

  std::string text() const {
    return fmt::format(
        "{} rounds, {} with tools and {} that fail drawn, {} requests, {} tokens, {} aborted, {} "
        "preemptions, {} tokens from the cache; "
        "steps: {} without tokens, {} of prompts, {} mixed, {} of decodes of up to {} rows, among "
        "them {} in two micro-batches, {} with logprobs, {} with filters, {} with masks, {} with "
        "grammars, "
        "{} plain; "
        "seconds: {:.1f} alone, {:.1f} opening, {:.1f} together",
        rounds, tools, failed, requests, tokens, aborted, preemptions, hits, silent, prompts, mixed,
        fmt::join(decodes, "+"), fmt::join(kRows, "/"), micro_batches, logprobs, filters, masks,
        grammars, plain, alone, opening, together);
  }
};

}  // namespace nanovllm
