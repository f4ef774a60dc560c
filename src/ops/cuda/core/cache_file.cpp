#include "ops/cuda/core/cache_file.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <fstream>

#include <unistd.h>

namespace nanovllm {

std::filesystem::path cache_file(std::string name) {
  std::ranges::replace_if(
      name, [](unsigned char c) { return !std::isalnum(c) && c != '-' && c != '.'; }, '_');
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache && *cache)
    return std::filesystem::path(cache) / "nanovllm" / name;
  if (const char* home = std::getenv("HOME"); home && *home)
    return std::filesystem::path(home) / ".cache" / "nanovllm" / name;
  return {};
}

std::string read_cache(const std::filesystem::path& file, size_t most_bytes) {
  std::error_code error;
  if (file.empty() || !std::filesystem::is_regular_file(file, error)) return {};
  std::ifstream in(file, std::ios::binary);
  std::string text(most_bytes + 1, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(in.gcount()));
  return text.size() <= most_bytes ? text : std::string();
}

void write_cache(const std::filesystem::path& file, std::string_view text) {
  if (file.empty()) return;
  std::error_code ignored;
  std::filesystem::create_directories(file.parent_path(), ignored);
  std::string draft = file.string() + ".XXXXXX";
  const int descriptor = mkstemp(draft.data());
  if (descriptor < 0) return;
  const bool written =
      write(descriptor, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  std::error_code error;
  if (close(descriptor) == 0 && written)
    std::filesystem::rename(draft, file, error);
  else
    error = std::make_error_code(std::errc::io_error);
  if (error) std::filesystem::remove(draft, ignored);
}

}  // namespace nanovllm
