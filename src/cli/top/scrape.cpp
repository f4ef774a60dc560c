#include "cli/top/scrape.h"

#include <charconv>
#include <cmath>
#include <limits>

namespace nanovllm::cli {
namespace {

std::optional<double> number(std::string_view text) {
  if (text == "+Inf" || text == "Inf") return std::numeric_limits<double>::infinity();
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data() || !std::isfinite(value)) return std::nullopt;
  return value;
}

/// The text in quotes behind `name=`.
std::optional<std::string> label_of(std::string_view labels, std::string_view name) {
  for (size_t at = labels.find(name); at != labels.npos; at = labels.find(name, at + 1)) {
    const bool is_whole = at == 0 || labels[at - 1] == ',' || labels[at - 1] == '{';
    const std::string_view rest = labels.substr(at + name.size());
    if (!is_whole || !rest.starts_with("=\"")) continue;
    std::string text;
    for (size_t i = 2; i < rest.size() && rest[i] != '"'; ++i) {
      const bool is_escaped = rest[i] == '\\' && i + 1 < rest.size();
      if (is_escaped) ++i;
      text += is_escaped && rest[i] == 'n' ? '\n' : rest[i];
    }
    return text;
  }
  return std::nullopt;
}

}  // namespace

Scrape::Scrape(std::string_view text) {
  for (size_t begin = 0, end; begin < text.size(); begin = end + 1) {
    end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = text.substr(begin, end - begin);
    const size_t name_end = line.find_first_of("{ ");
    if (line.starts_with('#') || name_end == line.npos) continue;
    const size_t brace = line[name_end] == '{' ? line.rfind('}') : name_end;
    if (brace == line.npos || brace < name_end) continue;
    std::string_view rest = line.substr(brace + 1);
    while (rest.starts_with(' ')) rest.remove_prefix(1);
    const auto value = number(rest.substr(0, rest.find(' ')));  // a time may follow
    if (!value) continue;
    samples_.emplace(line.substr(0, name_end),
                     std::pair(std::string(line.substr(name_end, brace - name_end)), *value));
  }
}

std::optional<double> Scrape::value(const std::string& name) const {
  if (samples_.count(name) == 0) return std::nullopt;
  return value(name, "");
}

double Scrape::value(const std::string& name, std::string_view part) const {
  double sum = 0;
  const auto [begin, end] = samples_.equal_range(name);
  for (auto at = begin; at != end; ++at)
    if (at->second.first.find(part) != std::string::npos) sum += at->second.second;
  return sum;
}

Buckets Scrape::buckets(const std::string& name) const {
  Buckets buckets;
  const auto [begin, end] = samples_.equal_range(name + "_bucket");
  for (auto at = begin; at != end; ++at)
    if (const auto bound = label_of(at->second.first, "le"))
      if (const auto le = number(*bound)) buckets[*le] += at->second.second;
  return buckets;
}

std::string Scrape::label(std::string_view name) const {
  for (const auto& [metric, sample] : samples_)
    if (const auto value = label_of(sample.first, name)) return *value;
  return {};
}

std::optional<double> quantile(const Buckets& before, const Buckets& now, double q) {
  const auto count = [&](const std::pair<const double, double>& bucket) {
    const auto old = before.find(bucket.first);
    return bucket.second - (old == before.end() ? 0 : old->second);
  };
  if (now.empty()) return std::nullopt;
  const double total = count(*now.rbegin());
  if (!(total > 0)) return std::nullopt;
  double below = 0, low = 0;
  for (const auto& bucket : now) {
    const double upto = count(bucket);
    if (upto >= q * total) {
      if (std::isinf(bucket.first)) return low;  // all that is known
      return low + (bucket.first - low) * (q * total - below) / (upto - below);
    }
    below = upto;
    low = bucket.first;
  }
  return low;
}

}  // namespace nanovllm::cli
