// Reads /metrics, from Prometheus' text format: ours, or that of another server with vLLM's
// names.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace nanovllm::cli {

/// A histogram's counts by upper bound, cumulative.
using Buckets = std::map<double, double>;

class Scrape {
 public:
  /// Lines that are no samples are skipped.
  explicit Scrape(std::string_view text);

  /// Of a gauge or counter, over all its labels.
  std::optional<double> value(const std::string& name) const;
  /// The sum of those whose labels have `part` ("finished_reason=\"error\"") alone.
  double value(const std::string& name, std::string_view part) const;
  /// Of a histogram, over all its labels.
  Buckets buckets(const std::string& name) const;
  /// The value of a label, from the first sample that has it; or "".
  std::string label(std::string_view name) const;

 private:
  std::multimap<std::string, std::pair<std::string, double>> samples_;  // labels and value by name
};

/// The value below which a share `q` of what came between two scrapes lies, interpolated in its
/// bucket as Prometheus' histogram_quantile does; nothing where nothing came.
std::optional<double> quantile(const Buckets& before, const Buckets& now, double q);

}  // namespace nanovllm::cli
