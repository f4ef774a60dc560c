// The limits of what a request or an engine may ask for: checked for every caller by the engine
// (engine/request_checks.h), and earlier, with the option's or the field's name, by front ends.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nanovllm {

// -- A request
constexpr double kMaxTemperature = 1e4;
constexpr double kMaxPenalty = 2;  ///< presence_penalty and frequency_penalty, and below 0
constexpr double kMaxRepetitionPenalty = 1e4;  ///< and the least is its inverse
constexpr size_t kMaxLogitBias = 1024;         ///< tokens in logit_bias ...
constexpr double kMaxBias = 100;               ///< ... and what each may get, and below 0
constexpr size_t kMaxBadWords = 128;           ///< bad_words, of kMaxStopBytes each
/// A text that is to be cut is read whole: so many times the context at most.
constexpr int64_t kMaxTruncatedContexts = 16;
constexpr size_t kMaxCacheSaltBytes = 1024;      ///< cache_salt ...
constexpr size_t kMaxCacheSaltFieldBytes = 256;  ///< ... in JSON: a server puts its own before it
constexpr int kMaxAnswers = 128;                 ///< n
constexpr int kMaxLogprobs = 20;                 ///< logprobs and prompt_logprobs
constexpr size_t kMaxStops = 64;                 ///< stop strings ...
constexpr size_t kMaxStopBytes = 1024;           ///< ... and bytes of each
constexpr int64_t kMaxStopTokenIds = 128;        ///< what one request may name ...
constexpr int64_t kMaxEosIds = 128;  ///< ... and one model may have: together, the ids that
                                     ///< min_tokens keeps a sequence from sampling

// -- An engine
constexpr int64_t kMaxNumSeqs = 65536;
constexpr int64_t kMaxNumBatchedTokens = 1 << 20;
constexpr int64_t kMinBlockSize = 8, kMaxBlockSize = 256;  ///< tokens; powers of two
constexpr int kMaxRanks = 64;                              ///< tensor_parallel_size
constexpr int kMaxThreads = 1024;  ///< of a CPU backend; OpenMP's own tables end a process beyond
constexpr int64_t kMaxKvEvents = 1'000'000'000;  ///< each number of kv_events_config

}  // namespace nanovllm
