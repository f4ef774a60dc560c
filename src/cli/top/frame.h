// The screen of `nanovllm top`: lines of plain ASCII.
#pragma once

#include <chrono>
#include <deque>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "cli/top/scrape.h"
#include "io/json.h"

namespace nanovllm::cli {

struct Sample {
  std::chrono::steady_clock::time_point time;
  Scrape scrape;
};

/// The lines for the newest of `samples` (one at least); rates and times are those since the
/// oldest. `live` is an update of /engine/live, or null where the server has none. No line is
/// longer than `columns`, and there are `rows` at most.
std::vector<std::string> frame(const std::string& url, const std::deque<Sample>& samples,
                               const Json& live, size_t columns, size_t rows);

}  // namespace nanovllm::cli
