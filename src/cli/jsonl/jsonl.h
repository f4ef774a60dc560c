// The JSON-lines contract: one request on an input line, one result on an output line.
#pragma once

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <nlohmann/json.hpp>

#include "nanovllm/llm.h"

#include "io/json.h"

namespace nanovllm::cli {

/// A conversation, to be turned into a prompt by the model's chat template.
struct Messages {
  Json messages;  ///< array of {"role", "content", ...}
  Json chat_template_kwargs = Json::object();
};

/// One request as the user wrote it.
struct Request {
  Json id;  ///< null, a string or an integer
  std::variant<std::string, std::vector<int32_t>, Messages> prompt;
  SamplingParams sampling_params;
  bool default_length = false;  ///< it does not say max_tokens
  std::string error;            ///< why the line is not acceptable; empty if it is
};

/// The values that a line's sampling parameters start from.
struct SamplingDefaults {
  SamplingParams without;  ///< of a line that has no "sampling_params"
  SamplingParams with;     ///< of a line that has them, for the fields that it leaves out
};

/// Never throws for what is in `line`: a bad line becomes a Request with an error that begins with
/// `where` ("line 3"). A line without an id gets its `number`; one that is no JSON object has id
/// null.
Request parse_request(std::string_view line, const std::string& where, int64_t number,
                      const SamplingDefaults& defaults);

/// The output line of a request, without the line end.
std::string format_output(const Request& request, const RequestOutput& output);

}  // namespace nanovllm::cli
