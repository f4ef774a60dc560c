// Any bytes as an input line: what is accepted is in range in every field, what is refused says
// why, and either gives a line of valid JSON.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "cli/jsonl/jsonl.h"
#include "engine/request_checks.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace nanovllm;
  constexpr int64_t kVocab = 1000;
  const std::string_view line(reinterpret_cast<const char*>(data), size);
  const cli::Request request = cli::parse_request(line, "line 1", 1, {});
  RequestOutput output;
  output.outputs.push_back(
      {.finish_reason = request.error.empty() ? FinishReason::length : FinishReason::error});
  output.error = request.error;
  parse_json(cli::format_output(request, output), "output line", ErrorKind::engine);
  if (!request.error.empty()) return 0;

  const SamplingParams& p = request.sampling_params;
  if (problem_with(p, kVocab)) return 0;
  require(std::isfinite(p.temperature) && p.temperature >= 0);
  require(p.top_p > 0 && p.top_p <= 1 && p.min_p >= 0 && p.min_p <= 1 && p.top_k >= -1);
  require(p.max_tokens >= 1 && p.min_tokens >= 0 && p.min_tokens <= p.max_tokens);
  for (const int64_t id : p.stop_token_ids) require(id >= 0 && id < kVocab);
  for (const std::string& stop : p.stop) require(!stop.empty());
  require(std::abs(p.presence_penalty) <= 2 && std::abs(p.frequency_penalty) <= 2);
  require(p.repetition_penalty >= 1e-4 && p.repetition_penalty <= 1e4);
  for (const int64_t id : p.allowed_token_ids) require(id >= 0 && id < kVocab);
  require(p.logit_bias.size() <= 1024 && p.bad_words.size() <= 128);
  for (const auto& [id, bias] : p.logit_bias)
    require(id >= 0 && id < kVocab && std::abs(bias) <= 100);
  require(!p.logprobs || (*p.logprobs >= 0 && *p.logprobs <= 20));
  require(!p.prompt_logprobs || (*p.prompt_logprobs >= 0 && *p.prompt_logprobs <= 20));
  if (const auto* ids = std::get_if<std::vector<int32_t>>(&request.prompt))
    if (!problem_with(*ids, kVocab))
      for (const int32_t id : *ids) require(id >= 0 && id < kVocab);
  return 0;
}
