#include "cli/jsonl.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <span>

#include <fmt/format.h>

#include "cli/suggest.h"
#include "core/check.h"
#include "io/json_object.h"

namespace nanovllm::cli {
namespace {

constexpr auto kBad = ErrorKind::invalid_argument;
constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
constexpr size_t kMaxIdBytes = 1024;  // ids are kept until their results are written

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

void refuse_unknown_fields(const JsonObject& object, const std::vector<std::string>& known,
                           std::span<const Neutral> neutral = {}) {
  for (const auto& [key, value] : object.json().items()) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    if (std::ranges::find(neutral, key, &Neutral::name) != neutral.end()) continue;
    std::string list;
    for (const std::string& name : known) list += (list.empty() ? "" : ", ") + name;
    object.refuse(fmt::format("unknown field {}{} (known: {})", quote(object.path(key)),
                              did_you_mean(key, known), list));
  }
}

template <class Optional, class Field>
void assign(Field& field, Optional&& value) {
  if (value) field = std::move(*value);
}

const std::vector<std::string>& sampling_names() {
  static const std::vector<std::string> names = {"temperature",
                                                 "top_p",
                                                 "top_k",
                                                 "min_p",
                                                 "seed",
                                                 "max_tokens",
                                                 "min_tokens",
                                                 "ignore_eos",
                                                 "stop",
                                                 "stop_token_ids",
                                                 "include_stop_str_in_output",
                                                 "logprobs",
                                                 "prompt_logprobs",
                                                 "skip_special_tokens",
                                                 "detokenize"};
  return names;
}

// The engine checks the values once more, together and against the model, as it does for all
// callers.
void read_sampling_params(const JsonObject& o, SamplingParams& p) {
  assign(p.temperature, o.optional_number("temperature"));
  assign(p.top_p, o.optional_number("top_p"));
  assign(p.top_k, o.optional_integer("top_k", -1, std::numeric_limits<int64_t>::max()));
  assign(p.min_p, o.optional_number("min_p"));
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
  if (const auto k = o.optional_integer("logprobs", 0, 20)) p.logprobs = static_cast<int>(*k);
  if (const auto k = o.optional_integer("prompt_logprobs", 0, 20))
    p.prompt_logprobs = static_cast<int>(*k);
  if (const Json* stop = o.find("stop")) {
    if (stop->is_string())
      p.stop = {stop->get<std::string>()};
    else
      assign(p.stop, o.optional_strings("stop"));
  }
  for (const Neutral& neutral : kNeutral) check_neutral(o, neutral);
  refuse_unknown_fields(o, sampling_names(), kNeutral);
}

void read_prompt(const JsonObject& o, Request& request) {
  const Json* text = o.find("prompt");
  const Json* ids = o.find("prompt_token_ids");
  const Json* messages = o.find("messages");
  const int given = (text != nullptr) + (ids != nullptr) + (messages != nullptr);
  if (given != 1)
    o.refuse(fmt::format("{} one of prompt, prompt_token_ids and messages",
                         given == 0 ? "needs" : "may have only"));
  if (o.find("chat_template_kwargs") && !messages)
    o.refuse("chat_template_kwargs goes with messages only");
  if (text) {
    request.prompt = *o.optional_string("prompt");
  } else if (ids) {
    if (!ids->is_array()) o.refuse("prompt_token_ids", "a list of integers", *ids);
    const auto values = *o.optional_integers("prompt_token_ids", 0, kMax);
    request.prompt = std::vector<int32_t>(values.begin(), values.end());
  } else {
    if (!messages->is_array() || messages->empty())
      o.refuse("messages", "a list of at least one message", *messages);
    Messages conversation{*messages};
    if (const auto kwargs = o.optional_object("chat_template_kwargs"))
      conversation.chat_template_kwargs = kwargs->json();
    request.prompt = std::move(conversation);
  }
}

// The shortest decimal that reads back as the same float: as a double it would have 17 digits.
Json to_json(float value) {
  if (!std::isfinite(value)) return nullptr;
  return std::strtod(fmt::format("{}", value).c_str(), nullptr);
}

Json to_json(const std::vector<PositionLogprobs>& positions) {
  Json list = Json::array();
  for (const PositionLogprobs& position : positions) {
    if (position.empty()) {
      list.push_back(nullptr);
      continue;
    }
    Json candidates = Json::array();
    for (const TokenLogprob& c : position)
      candidates.push_back(
          {{"token_id", c.token_id}, {"logprob", to_json(c.logprob)}, {"rank", c.rank}});
    list.push_back(std::move(candidates));
  }
  return list;
}

Json to_json(const CompletionOutput& answer, bool wants_logprobs) {
  Json json = {{"text", answer.text},
               {"token_ids", answer.token_ids},
               {"finish_reason", to_string(answer.finish_reason)}};
  if (wants_logprobs) json["logprobs"] = to_json(answer.logprobs);
  return json;
}

// A whole line of a file that is in another format, which the parser's words would not explain.
void refuse_other_lines(std::string_view line, const std::string& where) {
  while (!line.empty() && std::string_view(" \t\r").find(line.back()) != line.npos)
    line.remove_suffix(1);
  const size_t begin = line.find_first_not_of(" \t");
  const char first = begin == line.npos ? ' ' : line[begin];
  constexpr std::string_view kExpected = R"(each line is one request, as {"prompt": "..."})";
  check(line != "{" && line != "[" && line != "}" && line != "]" && first != '"', kBad,
        "{}: {}; JSON over several lines becomes such a file with jq -c (a list with jq -c '.[]')",
        where, kExpected);
  check(first != '[', kBad, "{}: must be a JSON object, not a list: {}", where, kExpected);
  check(first == '{', kBad, "{}: not valid JSON at byte 0: {}, not text or CSV", where, kExpected);
}

// Lines of other programs, and fields in another place than theirs.
void refuse_other_formats(const JsonObject& object) {
  if (object.find("custom_id") && object.find("body"))
    object.refuse(
        "an OpenAI batch line: give its body's messages or prompt here, custom_id as id, and the "
        "body's parameters in sampling_params");
  for (const std::string& name : sampling_names())
    if (object.contains(name))
      object.refuse(fmt::format("unknown field {}: it belongs in sampling_params", quote(name)));
}

}  // namespace

Request parse_request(std::string_view line, const std::string& where, int64_t number,
                      const SamplingDefaults& defaults) {
  Request request;
  try {
    refuse_other_lines(line, where);
    const Json json = parse_json(line, where, kBad);
    const JsonObject object(json, where, kBad);
    request.id = number;
    if (const Json* id = object.find("id")) {
      if (!id->is_string() && !id->is_number_integer())
        object.refuse("id", "a string or an integer", *id);
      if (id->is_string() && id->get_ref<const std::string&>().size() > kMaxIdBytes)
        object.refuse(fmt::format("id must have at most {} bytes", kMaxIdBytes));
      request.id = *id;
    }
    refuse_other_formats(object);
    refuse_unknown_fields(object, {"prompt", "prompt_token_ids", "messages", "id",
                                   "sampling_params", "chat_template_kwargs"});
    const auto params = object.optional_object("sampling_params");
    request.sampling_params = params ? defaults.with : defaults.without;
    if (params) read_sampling_params(*params, request.sampling_params);
    request.default_length = !params || !params->find("max_tokens");
    read_prompt(object, request);
  } catch (const Error& error) {
    request.error = error.what();
  }
  return request;
}

std::string format_output(const Request& request, const RequestOutput& output) {
  Json line = {{"id", request.id}, {"prompt_token_ids", output.prompt_token_ids}};
  const bool wants_logprobs = request.sampling_params.logprobs.has_value();
  if (output.outputs.size() == 1) {
    line.update(to_json(output.outputs[0], wants_logprobs));
  } else {
    for (const CompletionOutput& answer : output.outputs) {
      Json json = to_json(answer, wants_logprobs);
      json["index"] = answer.index;
      line["outputs"].push_back(std::move(json));
    }
  }
  if (request.sampling_params.prompt_logprobs)
    line["prompt_logprobs"] = to_json(output.prompt_logprobs);
  if (!output.error.empty()) line["error"] = output.error;
  const RequestMetrics& m = output.metrics;
  line["metrics"] = {{"queue_time", m.queue_time},
                     {"time_to_first_token", m.time_to_first_token},
                     {"total_time", m.total_time},
                     {"num_cached_tokens", m.num_cached_tokens},
                     {"num_preemptions", m.num_preemptions}};
  return line.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace nanovllm::cli
