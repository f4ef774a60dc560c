#include "engine/request_checks.h"

#include <bit>
#include <cmath>

#include "core/check.h"
#include "core/limits.h"
#include "core/sampling_fields.h"
#include "io/utf8.h"
#include "ops/backend.h"

namespace nanovllm {
namespace {

std::optional<std::string> problem_with(const char* name, const std::vector<std::string>& texts,
                                        size_t most) {
  if (texts.size() > most)
    return fmt::format("{} has {} strings: at most {} are allowed", name, texts.size(), most);
  for (const std::string& text : texts) {
    if (text.empty() || text.size() > kMaxStopBytes)
      return fmt::format("{} has a string of {} bytes: 1 to {} are allowed", name, text.size(),
                         kMaxStopBytes);
    if (find_invalid_utf8(text) != std::string::npos)
      return fmt::format("{} has a string that is not UTF-8", name);
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> problem_with(const SamplingParams& p, int64_t vocab_size) {
  for (const NumberField& field : kNumberFields)
    if (!field.allows(p.*field.value))
      return fmt::format("{} is {}: it must be {}", field.name, p.*field.value, field.rule);
  if (p.top_k < -1) return fmt::format("top_k is {}: it must be -1 or 0 (off) or more", p.top_k);
  if (p.n < 1 || p.n > kMaxAnswers)
    return fmt::format("n is {}: it must be between 1 and {}", p.n, kMaxAnswers);
  if (p.max_tokens < 1) return fmt::format("max_tokens is {}: it must be at least 1", p.max_tokens);
  if (p.min_tokens < 0 || p.min_tokens > p.max_tokens)
    return fmt::format("min_tokens is {}: it must be between 0 and max_tokens ({})", p.min_tokens,
                       p.max_tokens);
  if (auto problem = problem_with("stop", p.stop, kMaxStops)) return problem;
  if (auto problem = problem_with("bad_words", p.bad_words, kMaxBadWords)) return problem;
  if (!p.stop.empty() && !p.detokenize) return "stop strings need detokenize";
  if (std::ssize(p.stop_token_ids) > kMaxStopTokenIds)
    return fmt::format("stop_token_ids has {} ids: at most {} are allowed", p.stop_token_ids.size(),
                       kMaxStopTokenIds);
  for (const int64_t id : p.stop_token_ids)
    if (id < 0 || id >= vocab_size)
      return fmt::format("stop_token_ids has {}: ids are between 0 and {}", id, vocab_size - 1);
  if (std::ssize(p.allowed_token_ids) > vocab_size)
    return fmt::format("allowed_token_ids has {} ids: the vocabulary has {}",
                       p.allowed_token_ids.size(), vocab_size);
  for (const int64_t id : p.allowed_token_ids)
    if (id < 0 || id >= vocab_size)
      return fmt::format("allowed_token_ids has {}: ids are between 0 and {}", id, vocab_size - 1);
  if (p.logit_bias.size() > kMaxLogitBias)
    return fmt::format("logit_bias has {} tokens: at most {} are allowed", p.logit_bias.size(),
                       kMaxLogitBias);
  for (const auto& [id, bias] : p.logit_bias) {
    if (id < 0 || id >= vocab_size)
      return fmt::format("logit_bias has {}: ids are between 0 and {}", id, vocab_size - 1);
    if (!(std::abs(bias) <= kMaxBias))
      return fmt::format("logit_bias of {} is {}: it must be from -100 to 100", id, bias);
  }
  if (p.cache_salt.size() > kMaxCacheSaltBytes)
    return fmt::format("cache_salt has {} bytes: at most {} are allowed", p.cache_salt.size(),
                       kMaxCacheSaltBytes);
  if (p.priority < -INT32_MAX || p.priority > INT32_MAX)
    return fmt::format("priority is {}: it must be between -2147483647 and 2147483647", p.priority);
  for (const auto& [name, value] :
       {std::pair{"logprobs", p.logprobs}, std::pair{"prompt_logprobs", p.prompt_logprobs}}) {
    const int64_t most = std::min<int64_t>(kMaxLogprobs, vocab_size);
    if (value && (*value < 0 || *value > most))
      return fmt::format("{} is {}: it must be between 0 and {}", name, *value, most);
  }
  return std::nullopt;
}

std::optional<std::string> problem_with(std::span<const int32_t> prompt, int64_t vocab_size) {
  if (prompt.empty()) return "the prompt is empty: it must have at least one token";
  for (size_t i = 0; i < prompt.size(); ++i)
    if (prompt[i] < 0 || prompt[i] >= vocab_size)
      return fmt::format("prompt_token_ids[{}] is {}: ids are between 0 and {}", i, prompt[i],
                         vocab_size - 1);
  return std::nullopt;
}

namespace {

void check_kv_events(const EngineConfig& c) {
  const KvEventsConfig& e = c.kv_events;
  constexpr auto kBad = ErrorKind::invalid_argument;
  check(e.publisher.empty() || e.publisher == "zmq" || e.publisher == "null", kBad,
        "kv_events_config: publisher is {}: it must be zmq or null", e.publisher);
  if (!e.is_on()) return;
  check(!e.endpoint.empty(), kBad, "kv_events_config: endpoint is empty: give tcp://ADDRESS:PORT");
  for (const auto& [name, value, least] : {std::tuple{"buffer_steps", e.buffer_steps, 0},
                                           {"hwm", e.hwm, 0},
                                           {"max_queue_size", e.max_queue_size, 1}})
    check(value >= least && value <= kMaxKvEvents, kBad,
          "kv_events_config: {} is {}: it must be between {} and {}", name, value, least,
          kMaxKvEvents);
  check(c.enable_prefix_caching, kBad,
        "kv_events_config: without prefix caching there are no events: drop "
        "--no-enable-prefix-caching");
}

}  // namespace

void check_config(const EngineConfig& c) {
  const auto need = [](bool ok, const char* option, const auto& value, const char* rule) {
    check(ok, ErrorKind::invalid_argument, "{} is {}: it must be {}", option, value, rule);
  };
  need(c.max_model_len >= -1, "max_model_len", c.max_model_len,
       "positive, 0 to choose, or -1 for the model's");
  need(c.max_num_seqs >= 1 && c.max_num_seqs <= kMaxNumSeqs, "max_num_seqs", c.max_num_seqs,
       "between 1 and 65536");
  need(c.max_num_batched_tokens >= 0 && c.max_num_batched_tokens <= kMaxNumBatchedTokens,
       "max_num_batched_tokens", c.max_num_batched_tokens, "at most 1048576, or 0 to choose");
  need(c.gpu_memory_utilization > 0 && c.gpu_memory_utilization <= 1, "gpu_memory_utilization",
       c.gpu_memory_utilization, "in (0, 1]");
  need(c.cpu_kvcache_bytes >= 0, "cpu_kvcache_bytes", c.cpu_kvcache_bytes,
       "positive, or 0 to choose");
  need(c.block_size >= kMinBlockSize && c.block_size <= kMaxBlockSize &&
           std::has_single_bit(static_cast<unsigned>(c.block_size)),
       "block_size", c.block_size, "a power of two from 8 to 256");
  need(c.num_gpu_blocks_override >= 0 && c.num_gpu_blocks_override <= INT32_MAX / c.block_size,
       "num_gpu_blocks_override", c.num_gpu_blocks_override,
       "positive and fewer than 2^31 tokens in all, or 0 to choose");
  need(c.tensor_parallel_size >= 1 && c.tensor_parallel_size <= kMaxRanks, "tensor_parallel_size",
       c.tensor_parallel_size, "between 1 and 64");
  need(c.decode_micro_batches >= 0 && c.decode_micro_batches <= kMostMicroBatches,
       "decode_micro_batches", c.decode_micro_batches, "1 or 2, or 0 to choose");
  need(c.num_threads >= 0 && c.num_threads <= kMaxThreads, "num_threads", c.num_threads,
       "between 1 and 1024, or 0 to choose");
  need(c.scheduling_policy == "fcfs" || c.scheduling_policy == "priority", "scheduling_policy",
       c.scheduling_policy, "fcfs or priority");
  need(c.load_format == "auto" || c.load_format == "dummy", "load_format", c.load_format,
       "auto or dummy");
  check_kv_events(c);
}

}  // namespace nanovllm
