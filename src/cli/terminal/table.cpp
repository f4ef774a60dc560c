#include "cli/terminal/table.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

namespace nanovllm::cli {
namespace {

// Cells may hold a few characters outside ASCII: columns are counted, not bytes.
size_t width(const std::string& text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

bool is_numeric(const std::string& text) {
  return !text.empty() && ((text[0] >= '0' && text[0] <= '9') || text[0] == '-' || text[0] == '+');
}

}  // namespace

std::string Table::markdown() const {
  std::vector<size_t> widths;
  std::vector<bool> right;
  for (size_t c = 0; c < header_.size(); ++c) {
    widths.push_back(width(header_[c]));
    right.push_back(!rows_.empty());
    for (const auto& row : rows_) {
      widths[c] = std::max(widths[c], width(row[c]));
      if (!is_numeric(row[c])) right[c] = false;
    }
  }
  std::string text;
  const auto line = [&](const std::vector<std::string>& cells) {
    for (size_t c = 0; c < cells.size(); ++c) {
      const std::string padding(widths[c] - width(cells[c]), ' ');
      text += right[c] ? "| " + padding + cells[c] + " " : "| " + cells[c] + padding + " ";
    }
    text += "|\n";
  };
  line(header_);
  for (size_t c = 0; c < header_.size(); ++c)
    text += "|" + std::string(widths[c] + 1, '-') + (right[c] ? ":" : "-");
  text += "|\n";
  for (const auto& row : rows_) line(row);
  return text;
}

std::string with_commas(int64_t value) {
  std::string digits = std::to_string(value < 0 ? -value : value);
  for (size_t i = digits.size(); i > 3; i -= 3) digits.insert(i - 3, ",");
  return value < 0 ? "-" + digits : digits;
}

std::string binary_size(int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (std::abs(value) >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.2f} {}", value, kUnits[unit]);
}

}  // namespace nanovllm::cli
