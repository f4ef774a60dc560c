#include "cli/jsonl/jsonl.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include <fmt/format.h>

#include "chat/tools.h"
#include "cli/suggest.h"
#include "core/check.h"
#include "io/json_object.h"
#include "io/request_json.h"

namespace nanovllm::cli {
namespace {

constexpr auto kBad = ErrorKind::invalid_argument;
constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
constexpr size_t kMaxIdBytes = 1024;  // ids are kept until their results are written

void refuse_unknown_fields(const JsonObject& object, const std::vector<std::string>& known,
                           bool (*is_known)(std::string_view) = nullptr) {
  for (const auto& [key, value] : object.json().items()) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    if (is_known && is_known(key)) continue;
    std::string list;
    for (const std::string& name : known) list += (list.empty() ? "" : ", ") + name;
    object.refuse(fmt::format("unknown field {}{} (known: {})", quote(object.path(key)),
                              did_you_mean(key, known), list));
  }
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
    complete_messages(conversation.messages);
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
  static const std::vector<std::string> names = sampling_params_names();
  for (const std::string& name : names)
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
    if (params) {
      read_sampling_params(*params, request.sampling_params);
      refuse_unknown_fields(*params, sampling_params_names(), is_missing_sampling_param);
    }
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
