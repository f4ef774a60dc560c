#include "api/request_json.h"

#include <algorithm>
#include <limits>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/limits.h"
#include "core/sampling_fields.h"

namespace nanovllm {
namespace {

constexpr int64_t kMax = std::numeric_limits<int32_t>::max();

// vLLM's parameters that this engine does not have: null and the values that ask for nothing may be
// given, as programs do that write all fields. The value is JSON.
struct Neutral {
  std::string_view name, value = "null";
};
constexpr Neutral kNeutral[] = {{"best_of", "1"},
                                {"presence_penalty", "0"},
                                {"frequency_penalty", "0"},
                                {"repetition_penalty", "1"},
                                {"logit_bias", "{}"},
                                {"allowed_token_ids"},
                                {"bad_words", "[]"},
                                {"logits_processors", "[]"},
                                {"structured_outputs"},
                                {"guided_decoding"},
                                {"truncate_prompt_tokens"},
                                {"spaces_between_special_tokens", "true"},
                                {"output_kind", "0"},
                                {"stream_interval"},
                                {"flat_logprobs", "false"},
                                {"prompt_logprob_token_ids"},
                                {"prompt_logprob_start"},
                                {"logprob_token_ids"},
                                {"skip_clone", "false"},
                                {"extra_args", "{}"},
                                {"skip_reading_prefix_cache"},
                                {"thinking_token_budget"},
                                {"repetition_detection"},
                                {"routed_experts_prompt_start", "0"},
                                {"trace_decode_token_ids"}};

void check_neutral(const JsonObject& object, const Neutral& neutral) {
  const Json* value = object.find(neutral.name);
  if (value && *value != Json::parse(neutral.value))
    object.refuse(neutral.name, fmt::format("{} (not supported otherwise)", neutral.value), *value);
}

template <class Optional, class Field>
void assign(Field& field, Optional&& value) {
  if (value) field = std::move(*value);
}

}  // namespace

std::vector<std::string> sampling_params_names() {
  std::vector<std::string> names;
  for (const NumberField& field : kNumberFields) names.emplace_back(field.name);
  names.insert(names.end(), {"top_k", "seed", "max_tokens", "min_tokens", "n", "ignore_eos", "stop",
                             "stop_token_ids", "include_stop_str_in_output", "logprobs",
                             "prompt_logprobs", "skip_special_tokens", "detokenize"});
  return names;
}

bool is_missing_sampling_param(std::string_view name) {
  return std::ranges::find(kNeutral, name, &Neutral::name) != std::end(kNeutral);
}

// The engine checks the values once more, together and against the model, as it does for all
// callers.
void read_sampling_params(const JsonObject& o, SamplingParams& p) {
  for (const NumberField& field : kNumberFields)
    assign(p.*field.value, o.optional_number(field.name));
  assign(p.top_k, o.optional_integer("top_k", -1, std::numeric_limits<int64_t>::max()));
  assign(p.seed, o.optional_integer("seed", std::numeric_limits<int64_t>::min(),
                                    std::numeric_limits<int64_t>::max()));
  assign(p.max_tokens, o.optional_integer("max_tokens", 1, kMax));
  assign(p.min_tokens, o.optional_integer("min_tokens", 0, kMax));
  if (const auto n = o.optional_integer("n", 1, kMax)) p.n = static_cast<int>(*n);
  assign(p.ignore_eos, o.optional_bool("ignore_eos"));
  assign(p.stop_token_ids, o.optional_integers("stop_token_ids", 0, kMax));
  assign(p.include_stop_str_in_output, o.optional_bool("include_stop_str_in_output"));
  assign(p.skip_special_tokens, o.optional_bool("skip_special_tokens"));
  assign(p.detokenize, o.optional_bool("detokenize"));
  if (const auto k = o.optional_integer("logprobs", 0, kMaxLogprobs))
    p.logprobs = static_cast<int>(*k);
  if (const auto k = o.optional_integer("prompt_logprobs", 0, kMaxLogprobs))
    p.prompt_logprobs = static_cast<int>(*k);
  if (const Json* stop = o.find("stop")) {
    if (stop->is_string())
      p.stop = {stop->get<std::string>()};
    else
      assign(p.stop, o.optional_strings("stop"));
  }
  for (const Neutral& neutral : kNeutral) check_neutral(o, neutral);
}

}  // namespace nanovllm
