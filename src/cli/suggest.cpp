#include "cli/suggest.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include <fmt/format.h>

namespace nanovllm::cli {
namespace {

// Levenshtein's distance, one row of the table at a time.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t substituted = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({row[j] + 1, row[j + 1] + 1, substituted});
    }
  }
  return row.back();
}

}  // namespace

std::string nearest(std::string_view name, std::span<const std::string> candidates) {
  constexpr size_t kLongest = 64;  // a longer name is no misspelling, and the table is quadratic
  if (name.size() > kLongest) return "";
  std::string best;
  size_t best_distance = std::max<size_t>(2, name.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    const size_t distance = edit_distance(name, candidate);
    if (distance < best_distance) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

std::string did_you_mean(std::string_view name, std::span<const std::string> candidates) {
  const std::string best = nearest(name, candidates);
  return best.empty() ? "" : fmt::format("; did you mean {}?", best);
}

}  // namespace nanovllm::cli
