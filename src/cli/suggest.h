// "did you mean ...?" for misspelt options, commands and JSON fields, and for those of other
// engines.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace nanovllm::cli {

/// The candidate nearest to `name` by edit distance, or "" if none is near enough to be meant.
std::string nearest(std::string_view name, std::span<const std::string> candidates);

/// Advice on a name that is vLLM's or llama.cpp's and not this program's: its name here, or that
/// there is no such thing. "" for all other names.
std::string advice_on(std::string_view name);

/// `message` with the engine's parameters as options: "--load-format" for "load_format". The
/// library has one name for them, the command line another.
std::string with_option_names(std::string message);

/// `; did you mean "..."?`, or "" if no candidate is near.
std::string did_you_mean(std::string_view name, std::span<const std::string> candidates);

}  // namespace nanovllm::cli
