#include "cli/jsonl/request_source.h"

#include <utility>

#include <fmt/format.h>

namespace nanovllm::cli {

RequestSource::RequestSource(std::deque<Request> prompts, std::unique_ptr<LineReader> input,
                             SamplingDefaults defaults)
    : prompts_(std::move(prompts)), input_(std::move(input)), defaults_(std::move(defaults)) {}

std::optional<Request> RequestSource::next(bool wait, int wake) {
  if (!prompts_.empty()) {
    Request request = std::move(prompts_.front());
    prompts_.pop_front();
    request.id = taken_++;
    return request;
  }
  if (!input_) return std::nullopt;
  std::string line;
  switch (input_->next(line, wait, wake)) {
    case LineReader::Result::not_yet:
      return std::nullopt;
    case LineReader::Result::end_of_file:
      input_.reset();
      return std::nullopt;
    case LineReader::Result::too_long: {
      Request request;
      request.error = fmt::format("line {}: longer than {} MiB", input_->line_number(),
                                  LineReader::kMaxLine >> 20);
      ++taken_;
      return request;
    }
    case LineReader::Result::line:
      break;
  }
  return parse_request(line, fmt::format("line {}", input_->line_number()), taken_++, defaults_);
}

int64_t RequestSource::count() const {
  const int64_t lines = input_ ? input_->count_lines() : 0;
  return lines < 0 ? -1 : taken_ + static_cast<int64_t>(prompts_.size()) + lines;
}

void RequestSource::stop_waiting() {
  if (input_ && !input_->is_regular_file()) input_.reset();
}

}  // namespace nanovllm::cli
