#include "convert.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "engine/request_checks.h"
#include "io/json.h"
#include "io/model_config.h"
#include "io/request_json.h"
#include "kv_events/config.h"
#include "models/model.h"

namespace nanovllm::python {
namespace {

std::vector<int32_t> to_ids(nb::handle value) {
  std::vector<int32_t> ids;
  if (nb::try_cast(value, ids)) return ids;
  // Arrays and other sequences of whole numbers, such as those of numpy.
  if (nb::hasattr(value, "tolist") && nb::try_cast(value.attr("tolist")(), ids)) return ids;
  throw nb::type_error("a prompt must be text, a list of token ids, or a dict with one of these");
}

template <class Value>
Value to_value(const char* name, nb::handle given) {
  Value value{};
  if (nb::try_cast(given, value)) return value;
  const std::string type = std::is_same_v<Value, bool> ? "True or False"
                           : std::is_integral_v<Value>
                               ? fmt::format("an integer of {} bits", 8 * sizeof value)
                           : std::is_floating_point_v<Value> ? "a number"
                                                             : "a string";
  const auto shown = nb::cast<std::string>(nb::repr(given)).substr(0, 80);
  throw nb::type_error(fmt::format("{} must be {}, got {}", name, type, shown).c_str());
}

struct ConfigField {
  const char* name;
  void (*set)(EngineConfig&, const char* name, nb::handle value);
};

template <auto kMember>
constexpr ConfigField field(const char* name) {
  return {name, [](EngineConfig& config, const char* what, nb::handle given) {
            auto& member = config.*kMember;
            member = to_value<std::remove_reference_t<decltype(member)>>(what, given);
          }};
}

using C = EngineConfig;
constexpr ConfigField kFields[] = {
    field<&C::device>("device"),
    field<&C::dtype>("dtype"),
    field<&C::max_model_len>("max_model_len"),
    field<&C::allow_long_max_model_len>("allow_long_max_model_len"),
    field<&C::max_num_seqs>("max_num_seqs"),
    field<&C::max_num_batched_tokens>("max_num_batched_tokens"),
    field<&C::scheduling_policy>("scheduling_policy"),
    field<&C::gpu_memory_utilization>("gpu_memory_utilization"),
    field<&C::num_gpu_blocks_override>("num_gpu_blocks_override"),
    field<&C::cpu_kvcache_bytes>("cpu_kvcache_bytes"),
    field<&C::block_size>("block_size"),
    field<&C::enable_prefix_caching>("enable_prefix_caching"),
    field<&C::enforce_eager>("enforce_eager"),
    field<&C::decode_micro_batches>("decode_micro_batches"),
    field<&C::tensor_parallel_size>("tensor_parallel_size"),
    {"seed",
     [](EngineConfig& config, const char* what, nb::handle given) {
       int64_t negative = 0;  // any integer is a seed, as on the command line
       config.seed = nb::try_cast(given, negative) ? static_cast<uint64_t>(negative)
                                                   : to_value<uint64_t>(what, given);
     }},
    field<&C::num_threads>("num_threads"),
    field<&C::load_format>("load_format"),
    field<&C::quantization>("quantization"),
    field<&C::dequantize>("dequantize"),
    field<&C::kv_cache_dtype>("kv_cache_dtype"),
    field<&C::skip_tokenizer_init>("skip_tokenizer_init"),
    field<&C::parse_special_in_messages>("parse_special_in_messages"),
    {"kv_events_config",
     [](EngineConfig& config, const char* what, nb::handle given) {
       config.kv_events = read_kv_events_config(to_value<std::string>(what, given), what);
     }},
};

nb::object none_or(const char* text) {
  return *text == '\0' ? nb::none() : nb::object(nb::str(text));
}
nb::object none_or(const std::string& text) { return none_or(text.c_str()); }

/// [[(token_id, logprob, rank, decoded_token)]], by position.
nb::list to_python(const std::vector<PositionLogprobs>& positions, const Tokenizer* tokenizer) {
  nb::list list;
  for (const PositionLogprobs& position : positions) {
    nb::list candidates;
    for (const TokenLogprob& c : position) {
      const int32_t id = c.token_id;
      candidates.append(nb::make_tuple(
          id, static_cast<double>(c.logprob), c.rank,
          tokenizer ? nb::object(nb::cast(tokenizer->decode({&id, 1}, false))) : nb::none()));
    }
    list.append(candidates);
  }
  return list;
}

/// A stop string, or a stop token's id, which the engine gives in decimal.
nb::object stop_reason_of(const CompletionOutput& answer) {
  if (answer.finish_reason != FinishReason::stop || answer.token_ids.empty() ||
      answer.stop_reason != std::to_string(answer.token_ids.back()))
    return none_or(answer.stop_reason);
  return nb::int_(answer.token_ids.back());
}

nb::tuple to_python(const CompletionOutput& answer, const Tokenizer* tokenizer) {
  return nb::make_tuple(
      answer.index, answer.text, answer.token_ids,
      answer.logprobs.empty() ? nb::none() : nb::object(to_python(answer.logprobs, tokenizer)),
      none_or(to_string(answer.finish_reason)), stop_reason_of(answer));
}

}  // namespace

std::string to_text(nb::handle text) {
  Py_ssize_t size = 0;
  const char* bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (!bytes) nb::raise_python_error();
  return {bytes, static_cast<size_t>(size)};
}

Prompt to_prompt(nb::handle value) {
  if (nb::isinstance<nb::str>(value)) return {to_text(value)};
  if (nb::isinstance<Prompt>(value)) return nb::cast<Prompt>(value);
  if (nb::isinstance<nb::dict>(value)) {
    const nb::dict dict = nb::borrow<nb::dict>(value);
    for (const auto& [key, given] : dict) {
      const auto name = nb::cast<std::string>(nb::str(key));
      if (name == "prompt" || name == "prompt_token_ids" || name == "cache_salt" ||
          PyObject_IsTrue(given.ptr()) == 0)
        continue;
      throw nb::type_error(
          ("a prompt has no " + name + " here: prompt, prompt_token_ids or cache_salt").c_str());
    }
    const nb::object none = nb::none();
    const nb::object ids = dict.get("prompt_token_ids", none), text = dict.get("prompt", none);
    if (!ids.is_none()) return {to_ids(ids)};
    if (!nb::isinstance<nb::dict>(text)) return to_prompt(text);
  }
  return {to_ids(value)};
}

EngineConfig to_config(const nb::dict& options) {
  EngineConfig config;
  for (const auto& [key, value] : options) {
    const auto name = nb::cast<std::string>(key);
    const auto* known =
        std::ranges::find(kFields, name, [](const ConfigField& f) { return f.name; });
    if (known == std::end(kFields)) throw nb::type_error(name.c_str());
    known->set(config, known->name, value);
  }
  return config;
}

std::vector<std::string> config_names() {
  std::vector<std::string> names;
  for (const ConfigField& known : kFields) names.emplace_back(known.name);
  return names;
}

int64_t longest_context(const std::string& directory) {
  return load_model_config(directory, config_defaults).longest_context();
}

SamplingParams to_params(const std::string& json, int kind) {
  constexpr auto kBad = ErrorKind::invalid_argument;
  const Json parsed = parse_json(json, "SamplingParams", kBad);
  SamplingParams params;
  read_sampling_params(JsonObject(parsed, "SamplingParams", kBad), params);
  params.output_kind = kind == 1   ? OutputKind::delta
                       : kind == 2 ? OutputKind::final_only
                                   : OutputKind::cumulative;
  return params;
}

void check_params(const std::string& json) {
  if (const auto problem = problem_with(to_params(json, 0), INT32_MAX))
    throw Error(ErrorKind::invalid_argument, *problem);
}

nb::tuple to_python(const RequestOutput& output, const Tokenizer* tokenizer, bool with_prompt) {
  nb::list answers;
  for (const CompletionOutput& answer : output.outputs)
    answers.append(to_python(answer, tokenizer));
  const RequestMetrics& m = output.metrics;
  return nb::make_tuple(
      output.request_id, with_prompt ? nb::object(nb::cast(output.prompt_token_ids)) : nb::none(),
      answers, output.finished, none_or(output.error),
      output.prompt_logprobs.empty() ? nb::none()
                                     : nb::object(to_python(output.prompt_logprobs, tokenizer)),
      nb::make_tuple(m.queue_time, m.time_to_first_token, m.total_time, m.num_cached_tokens,
                     m.num_preemptions));
}

nb::dict to_python(const EngineInfo& info) {
  nb::dict dict;
  dict["device"] = info.device;
  dict["architecture"] = info.architecture;
  dict["dtype"] = info.dtype;
  dict["kv_cache_dtype"] = info.kv_cache_dtype;
  dict["num_parameters"] = info.num_parameters;
  dict["weight_bytes"] = info.weight_bytes;
  dict["workspace_bytes"] = info.workspace_bytes;
  dict["kv_cache_bytes"] = info.kv_cache_bytes;
  dict["available_bytes"] = info.available_bytes;
  dict["num_blocks"] = info.num_blocks;
  dict["block_size"] = info.block_size;
  dict["max_model_len"] = info.max_model_len;
  dict["vocab_size"] = info.vocab_size;
  dict["max_num_seqs"] = info.max_num_seqs;
  dict["max_num_batched_tokens"] = info.max_num_batched_tokens;
  dict["notes"] = info.notes;
  return dict;
}

nb::dict to_python(const EngineStats& stats) {
  nb::dict dict;
  dict["steps"] = stats.steps;
  dict["prompt_tokens"] = stats.prompt_tokens;
  dict["cached_prompt_tokens"] = stats.cached_prompt_tokens;
  dict["generated_tokens"] = stats.generated_tokens;
  dict["preemptions"] = stats.preemptions;
  dict["waiting"] = stats.waiting;
  dict["running"] = stats.running;
  dict["free_blocks"] = stats.free_blocks;
  dict["waiting_tokens"] = stats.waiting_tokens;
  dict["schedule_seconds"] = stats.schedule_seconds;
  dict["build_seconds"] = stats.build_seconds;
  return dict;
}

nb::dict to_python(const SamplingParams& params) {
  nb::dict dict;
  dict["temperature"] = params.temperature;
  dict["top_k"] = params.top_k;
  dict["top_p"] = params.top_p;
  dict["min_p"] = params.min_p;
  dict["repetition_penalty"] = params.repetition_penalty;
  dict["max_tokens"] = params.max_tokens;
  return dict;
}

void raise_signals() {
  const nb::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) nb::raise_python_error();
}

}  // namespace nanovllm::python
