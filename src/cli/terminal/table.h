// Aligned tables for people: numbers to the right, text to the left.
#pragma once

#include <string>
#include <vector>

namespace nanovllm::cli {

class Table {
 public:
  explicit Table(std::vector<std::string> header) : header_(std::move(header)) {}
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  /// Markdown with padded cells, as llama-bench prints it: readable as it is, and pasted anywhere.
  std::string markdown() const;

 private:
  std::vector<std::string> header_;
  std::vector<std::vector<std::string>> rows_;
};

/// "1,192,099,840"
std::string with_commas(int64_t value);
/// "1.11 GiB"
std::string binary_size(int64_t bytes);

}  // namespace nanovllm::cli
