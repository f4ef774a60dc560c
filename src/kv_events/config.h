// The JSON form of KvEventsConfig: vLLM's --kv-events-config.
#pragma once

#include <string_view>

#include "nanovllm/params.h"

namespace nanovllm {

/// Reads an object with the fields of KvEventsConfig; `what` names it in errors. Throws
/// Error(invalid_argument): no JSON object, a field of the wrong type, or one that there is not.
KvEventsConfig read_kv_events_config(std::string_view json, std::string_view what);

}  // namespace nanovllm
