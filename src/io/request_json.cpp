#include "io/request_json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/limits.h"
#include "core/sampling_fields.h"

namespace nanovllm {
namespace {

constexpr int64_t kMax = std::numeric_limits<int32_t>::max();

// vLLM's and llama.cpp's parameters that this engine does not have: null and the values that ask
// for nothing may be given, as programs do that write all fields. The value is JSON.
struct Neutral {
  std::string_view name, value = "null", instead{};  // the field that has the effect here
};
constexpr Neutral kNeutral[] = {{"best_of", "1"},
                                {"logits_processors", "[]"},
                                {"spaces_between_special_tokens", "true"},
                                {"output_kind", "0"},
                                {"flat_logprobs", "false"},
                                {"prompt_logprob_token_ids"},
                                {"prompt_logprob_start"},
                                {"logprob_token_ids"},
                                {"skip_clone", "false"},
                                {"extra_args", "{}"},
                                {"skip_reading_prefix_cache"},
                                {"thinking_token_budget", "-1"},
                                {"repetition_detection"},
                                {"routed_experts_prompt_start", "0"},
                                {"trace_decode_token_ids"},
                                // llama.cpp's
                                {"n_predict", "-1", "max_tokens"},
                                {"repeat_penalty", "1", "repetition_penalty"},
                                {"samplers"},
                                {"typical_p", "1"},
                                {"top_n_sigma", "-1"},
                                {"mirostat", "0"},
                                {"dynatemp_range", "0"},
                                {"dry_multiplier", "0"},
                                {"xtc_probability", "0"}};

struct Renamed {
  std::string_view name, today;
};
constexpr Renamed kRenamed[] = {{"guided_json", "json"},
                                {"guided_regex", "regex"},
                                {"guided_choice", "choice"},
                                {"guided_grammar", "grammar"},
                                {"guided_json_object", "json_object"},
                                {"guided_decoding", "..."},
                                {"guided_decoding_backend", ""},
                                {"guided_whitespace_pattern", ""},
                                {"structural_tag", "structural_tag"},
                                {"json_schema", "json"},  // llama.cpp's, as is the next
                                {"grammar", "grammar"}};

void check_renamed(const JsonObject& object, const Renamed& renamed) {
  if (!object.find(renamed.name)) return;
  if (renamed.today.empty())
    object.refuse(fmt::format("{} is not supported: leave it out", renamed.name));
  object.refuse(fmt::format("{} is not supported: write \"structured_outputs\": {{\"{}\": ...}}",
                            renamed.name, renamed.today));
}

/// A schema or a tag: JSON, or its text.
std::string json_text(const JsonObject& object, std::string_view key) {
  const Json* value = object.find(key);
  if (!value) return "";
  const bool schema = value->is_boolean() && key != "structural_tag";
  if (!value->is_object() && !value->is_string() && !schema)
    object.refuse(key, "an object or its text", *value);
  return value->is_string() ? value->get<std::string>() : value->dump();
}

// vLLM's object.
void read_structured_outputs(const JsonObject& o, StructuredOutputs& into) {
  into.json = json_text(o, "json");
  into.structural_tag = json_text(o, "structural_tag");
  into.regex = o.optional_string("regex").value_or("");
  into.grammar = o.optional_string("grammar").value_or("");
  into.choice = o.optional_strings("choice").value_or(std::vector<std::string>());
  into.json_object = o.optional_bool("json_object").value_or(false);
  constexpr std::string_view kKnown[] = {"json",    "regex",       "choice",
                                         "grammar", "json_object", "structural_tag"};
  constexpr std::string_view kFlags[] = {"disable_fallback", "disable_any_whitespace",
                                         "disable_additional_properties"};
  for (auto it = o.json().begin(); it != o.json().end(); ++it) {
    const bool neutral =
        it->is_null() || (*it == false && std::ranges::count(kFlags, it.key()) > 0);
    if (!neutral && std::ranges::count(kKnown, it.key()) == 0)
      o.refuse(o.path(it.key()) + " is not supported: leave it out");
  }
  const int given = !into.json.empty() + !into.regex.empty() + !into.choice.empty() +
                    !into.grammar.empty() + into.json_object + !into.structural_tag.empty();
  if (given != 1)
    o.refuse(
        "structured_outputs must have one of json, regex, choice, grammar, json_object and "
        "structural_tag");
}

// OpenAI's object. A schema is enforced whether or not it says `strict`.
void read_response_format(const JsonObject& o, StructuredOutputs& into) {
  const std::string type = o.optional_string("type").value_or("");
  if (type == "text") return;
  if (type == "json_object") {
    into.json = json_text(o, "schema");  // llama.cpp's short form of json_schema
    into.json_object = into.json.empty();
  } else if (type == "json_schema") {
    const auto holder = o.optional_object("json_schema");
    if (!holder) o.refuse("response_format needs json_schema: {\"name\": ..., \"schema\": {...}}");
    into.json = json_text(*holder, "schema");
    if (into.json.empty()) o.refuse("response_format.json_schema needs schema");
  } else if (type == "structural_tag") {
    into.structural_tag = o.json().dump();
  } else {
    const Json* given = o.find("type");
    o.refuse("type", "text, json_object, json_schema or structural_tag", given ? *given : Json());
  }
}

void read_structure(const JsonObject& o, StructuredOutputs& into) {
  for (const Renamed& renamed : kRenamed) check_renamed(o, renamed);
  if (const auto format = o.optional_object("response_format")) read_response_format(*format, into);
  const auto asked = o.optional_object("structured_outputs");
  if (!asked) return;
  if (!into.empty())
    o.refuse("response_format and structured_outputs both ask for a structure: give one of them");
  read_structured_outputs(*asked, into);
}

Json structured_outputs_json(const StructuredOutputs& asked) {
  Json json = Json::object();
  const auto add = [&json](const char* name, const auto& value) {
    if (!value.empty()) json[name] = value;
  };
  add("json", asked.json);
  add("regex", asked.regex);
  add("choice", asked.choice);
  add("grammar", asked.grammar);
  add("structural_tag", asked.structural_tag);
  if (asked.json_object) json["json_object"] = true;
  return json;
}

// The best n of n answers are all of them: clients of the legacy API write best_of so.
void check_neutral(const JsonObject& object, const Neutral& neutral, int n) {
  const Json* value = object.find(neutral.name);
  if (value && neutral.name == "best_of" && *value == n) return;
  if (!value || *value == Json::parse(neutral.value)) return;
  const std::string otherwise =
      neutral.instead.empty() ? "not supported otherwise" : fmt::format("use {}", neutral.instead);
  object.refuse(neutral.name, fmt::format("{} ({})", neutral.value, otherwise), *value);
}

// Its keys are token ids in decimal, as JSON has no other keys.
void read_logit_bias(const JsonObject& o, SamplingParams& p) {
  const auto biases = o.optional_object("logit_bias");
  if (!biases) return;
  p.logit_bias.clear();
  for (const auto& [key, value] : biases->json().items()) {
    int32_t id = 0;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
    if (error != std::errc() || end != key.data() + key.size() || std::to_string(id) != key)
      o.refuse("logit_bias", "an object whose names are token ids", Json(key.substr(0, 64)));
    // Not optional_number(key): a look-up of each key is quadratic in what a client sends.
    if (!value.is_number() || !std::isfinite(value.get<double>()))
      biases->refuse(key, "a number", value);
    p.logit_bias[id] = value.get<double>();
  }
}

template <class Optional, class Field>
void assign(Field& field, Optional&& value) {
  if (value) field = std::move(*value);
}

}  // namespace

std::vector<std::string> sampling_params_names() {
  std::vector<std::string> names;
  for (const NumberField& field : kNumberFields) names.emplace_back(field.name);
  names.insert(names.end(), {"top_k",
                             "seed",
                             "max_tokens",
                             "min_tokens",
                             "n",
                             "ignore_eos",
                             "stop",
                             "stop_token_ids",
                             "logit_bias",
                             "bad_words",
                             "allowed_token_ids",
                             "truncate_prompt_tokens",
                             "cache_salt",
                             "priority",
                             "stream_interval",
                             "include_stop_str_in_output",
                             "logprobs",
                             "prompt_logprobs",
                             "skip_special_tokens",
                             "detokenize",
                             "structured_outputs",
                             "response_format"});
  return names;
}

bool is_missing_sampling_param(std::string_view name) {
  return std::ranges::find(kNeutral, name, &Neutral::name) != std::end(kNeutral) ||
         std::ranges::find(kRenamed, name, &Renamed::name) != std::end(kRenamed);
}

// The engine checks the values once more, together and against the model, as it does for all
// callers.
void read_sampling_params(const JsonObject& o, SamplingParams& p) {
  for (const NumberField& field : kNumberFields)
    assign(p.*field.value, o.optional_number(field.name));
  assign(p.top_k, o.optional_integer("top_k", -1, std::numeric_limits<int64_t>::max()));
  assign(p.seed, o.optional_integer("seed", std::numeric_limits<int64_t>::min(),
                                    std::numeric_limits<int64_t>::max()));
  if (p.seed == -1) p.seed.reset();  // in vLLM and llama.cpp, too, it asks for any seed
  assign(p.max_tokens, o.optional_integer("max_tokens", 1, kMax));
  assign(p.min_tokens, o.optional_integer("min_tokens", 0, kMax));
  if (const auto n = o.optional_integer("n", 1, kMax)) p.n = static_cast<int>(*n);
  assign(p.ignore_eos, o.optional_bool("ignore_eos"));
  assign(p.stop_token_ids, o.optional_integers("stop_token_ids", 0, kMax));
  if (auto ids = o.optional_integers("allowed_token_ids", 0, kMax)) {
    if (ids->empty()) o.refuse("allowed_token_ids", "a list that is not empty", Json::array());
    p.allowed_token_ids = std::move(*ids);
  }
  assign(p.bad_words, o.optional_strings("bad_words"));
  if (const auto salt = o.optional_string("cache_salt")) {
    if (salt->empty() || salt->size() > kMaxCacheSaltFieldBytes)
      o.refuse("cache_salt", "a string of 1 to 256 bytes", Json(salt->substr(0, 64)));
    p.cache_salt = *salt;
  }
  assign(p.truncate_prompt_tokens, o.optional_integer("truncate_prompt_tokens", -1, kMax));
  assign(p.priority, o.optional_integer("priority", -kMax, kMax));
  // A wish about how a stream is cut: an answer's bytes are the same.
  (void)o.optional_integer("stream_interval", 1, kMax);
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
  read_logit_bias(o, p);
  read_structure(o, p.structured_outputs);
  for (const Neutral& neutral : kNeutral) check_neutral(o, neutral, p.n);
}

Json sampling_params_json(const SamplingParams& p) {
  Json json = Json::object();
  for (const NumberField& field : kNumberFields) json[std::string(field.name)] = p.*field.value;
  json.update({{"top_k", p.top_k},
               {"max_tokens", p.max_tokens},
               {"min_tokens", p.min_tokens},
               {"n", p.n},
               {"ignore_eos", p.ignore_eos},
               {"stop", p.stop},
               {"stop_token_ids", p.stop_token_ids},
               {"include_stop_str_in_output", p.include_stop_str_in_output},
               {"skip_special_tokens", p.skip_special_tokens},
               {"detokenize", p.detokenize}});
  const auto add = [&json](const char* name, const auto& value) {
    if (value) json[name] = *value;
  };
  add("seed", p.seed);
  add("logprobs", p.logprobs);
  add("prompt_logprobs", p.prompt_logprobs);
  for (const auto& [id, bias] : p.logit_bias) json["logit_bias"][std::to_string(id)] = bias;
  if (!p.allowed_token_ids.empty()) json["allowed_token_ids"] = p.allowed_token_ids;
  if (!p.bad_words.empty()) json["bad_words"] = p.bad_words;
  if (p.structured_outputs.has_structure())
    json["structured_outputs"] = structured_outputs_json(p.structured_outputs);
  return json;
}

}  // namespace nanovllm
