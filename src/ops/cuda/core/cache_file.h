// Small text files that this user's programs keep between runs. One that is lost, broken or cannot
// be written is no error: what it said is found out again.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace nanovllm {

/// The file `name` of $XDG_CACHE_HOME/nanovllm/ or ~/.cache/nanovllm/; empty if nothing says where.
/// A character that is neither letter, digit, '-' nor '.' becomes '_'.
std::filesystem::path cache_file(std::string name);

/// The file's text; empty if there is none, if it is larger than `most_bytes`, or no file.
std::string read_cache(const std::filesystem::path& file, size_t most_bytes);

/// Replaces the file as a whole: who reads it meanwhile sees the old text or the new one.
void write_cache(const std::filesystem::path& file, std::string_view text);

}  // namespace nanovllm
