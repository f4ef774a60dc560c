#include "ops/cuda/gemm/cublaslt/gemm_families.h"

#include <algorithm>
#include <optional>
#include <sstream>
#include <string>

#include "ops/cuda/core/cache_file.h"

namespace nanovllm {
namespace {

// The title, a line for each family (its number and a word), and the end: a file that was cut off
// has none.
constexpr const char *kTitle = "nanovllm cublaslt families 1", *kAgrees = "agrees",
                     *kDiffers = "differs", *kEnd = "end";
constexpr size_t kMostBytes = 1024;

/// Nothing unless every line of the text is as it should be.
std::optional<std::map<int32_t, bool>> parse(const std::string& text) {
  std::istringstream in(text);
  std::string line;
  if (!std::getline(in, line) || line != kTitle) return std::nullopt;
  std::map<int32_t, bool> verdicts;
  while (std::getline(in, line) && line != kEnd) {
    std::istringstream words(line);
    int32_t family = 0;
    std::string verdict, rest;
    if (!(words >> family >> verdict) || words >> rest || !GemmFamilies::is_candidate(family) ||
        (verdict != kAgrees && verdict != kDiffers))
      return std::nullopt;
    verdicts[family] = verdict == kAgrees;
  }
  if (line != kEnd) return std::nullopt;
  return verdicts;
}

}  // namespace

bool GemmFamilies::is_candidate(int32_t family) {
  return std::ranges::find(kCandidates, family) != std::end(kCandidates);
}

GemmFamilies::GemmFamilies(std::filesystem::path file) : file_(std::move(file)) {
  if (auto verdicts = parse(read_cache(file_, kMostBytes))) {
    agrees_ = std::move(*verdicts);
    are_known_ = true;
  }
}

void GemmFamilies::learn(int32_t family, bool agrees) {
  const auto [place, is_new] = agrees_.try_emplace(family, agrees);
  if (!is_new) place->second = place->second && agrees;
}

void GemmFamilies::keep() {
  are_known_ = true;
  std::string text = std::string(kTitle) + '\n';
  for (const auto& [family, agrees] : agrees_)
    text += std::to_string(family) + ' ' + (agrees ? kAgrees : kDiffers) + '\n';
  write_cache(file_, text + kEnd + '\n');
}

bool GemmFamilies::may_use(int32_t family) const {
  const auto verdict = agrees_.find(family);
  return is_candidate(family) && verdict != agrees_.end() && verdict->second;
}

}  // namespace nanovllm
