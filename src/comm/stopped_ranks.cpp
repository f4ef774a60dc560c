#include "comm/stopped_ranks.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <unistd.h>

namespace nanovllm {
namespace {

namespace fs = std::filesystem;

/// The part that can be read: a process may end meanwhile, at which an iterator would throw.
std::string contents(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return std::move(text).str();
}

/// The value of `name` in a process's environment: "A=1\0B=2\0...".
std::optional<std::string> value_in(const std::string& environment, std::string_view name) {
  const std::string all = '\0' + environment, key = '\0' + std::string(name) + '=';
  const size_t at = all.find(key);
  if (at == std::string::npos) return std::nullopt;
  const size_t begin = at + key.size();
  return all.substr(begin, all.find('\0', begin) - begin);
}

/// "1234 (name) T ...", where the name may hold anything.
bool is_stopped(const std::string& status) {
  const size_t name_ends = status.rfind(')');
  return name_ends != std::string::npos && status.compare(name_ends, 3, ") T") == 0;
}

}  // namespace

std::vector<int> stopped_ranks() {
  // Variables that name the job, and the process in it: of Open MPI and others over PMIx.
  constexpr const char *kJob = "PMIX_NAMESPACE", *kRank = "PMIX_RANK";
  std::vector<int> ranks;
  const char* job = std::getenv(kJob);
  if (job == nullptr) return ranks;
  const std::string self = std::to_string(::getpid());
  std::error_code error;
  for (fs::directory_iterator entry("/proc", error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string process = entry->path().filename();
    if (process.find_first_not_of("0123456789") != std::string::npos || process == self ||
        !is_stopped(contents(entry->path() / "stat")))
      continue;
    const std::string environment = contents(entry->path() / "environ");
    const auto rank = value_in(environment, kRank);
    if (rank && value_in(environment, kJob) == job) ranks.push_back(std::atoi(rank->c_str()));
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

std::string describe_missing_ranks(const std::string& otherwise) {
  const std::vector<int> stopped = stopped_ranks();
  if (stopped.empty()) return otherwise;
  return fmt::format("rank{} {} {} stopped", stopped.size() > 1 ? "s" : "",
                     fmt::join(stopped, ", "), stopped.size() > 1 ? "are" : "is");
}

}  // namespace nanovllm
