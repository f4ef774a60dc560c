// "did you mean ...?" for misspelt options, commands and JSON fields.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace nanovllm::cli {

/// The candidate nearest to `name` by edit distance, or "" if none is near enough to be meant.
std::string nearest(std::string_view name, std::span<const std::string> candidates);

/// `; did you mean "..."?`, or "" if no candidate is near.
std::string did_you_mean(std::string_view name, std::span<const std::string> candidates);

}  // namespace nanovllm::cli
