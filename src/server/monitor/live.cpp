#include "server/monitor/live.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/seconds.h"
#include "server/http/error_body.h"

namespace nanovllm::server {
namespace {

constexpr size_t kMostWatchers = 64, kMostBlocks = 16384, kMostRuns = 20000;
constexpr int64_t kMostSequences = 512;
constexpr auto kPeriod = std::chrono::milliseconds(100);

/// "[1,20,7,1]": runs of values that `continues` one another, as the first and their number.
template <class Values, class Continues>
void append_runs(std::string& out, const Values& values, size_t size, size_t& runs_left,
                 const Continues& continues) {
  out += '[';
  for (size_t begin = 0, end; begin < size && runs_left > 0; begin = end, --runs_left) {
    for (end = begin + 1; end < size && continues(values[end - 1], values[end]);) ++end;
    fmt::format_to(std::back_inserter(out), "{}{},{}", begin == 0 ? "" : ",",
                   static_cast<int>(values[begin]), end - begin);
  }
  out += ']';
}

void append_sequences(std::string& out, const std::vector<SequenceSnapshot>& sequences,
                      size_t& runs_left) {
  for (const SequenceSnapshot& s : sequences) {
    // Neighbours get colours that are far apart.
    fmt::format_to(std::back_inserter(out),
                   "{}{{\"hue\":{},\"prompt\":{},\"generated\":{},\"max\":{},\"computed\":{},"
                   "\"cached\":{},\"step\":{},\"preemptions\":{},\"blocks\":",
                   &s == &sequences.front() ? "" : ",", s.arrival * 137 % 360, s.num_prompt_tokens,
                   s.num_generated, s.max_tokens, s.num_computed_tokens, s.num_cached_tokens,
                   s.num_scheduled_tokens, s.num_preemptions);
    append_runs(out, s.block_table, s.block_table.size(), runs_left,
                [](int32_t a, int32_t b) { return b == a + 1; });
    out += '}';
  }
}

}  // namespace

std::string live_json(const std::string& model, const EngineInfo& info,
                      const EngineSnapshot& snapshot) {
  const EngineStats& s = snapshot.stats;
  std::string out = "{\"info\":{\"model\":";
  append_json(out, model);
  out += ",\"device\":";
  append_json(out, info.device);
  out += fmt::format(
      ",\"num_blocks\":{},\"block_size\":{},\"max_num_seqs\":{},\"max_num_batched_tokens\":{},"
      "\"max_model_len\":{}}},\"stats\":{{\"steps\":{},\"step_seconds\":{:.6f},"
      "\"prompt_tokens\":{},\"cached_prompt_tokens\":{},\"generated_tokens\":{},"
      "\"preemptions\":{},\"running\":{},\"waiting\":{},\"free_blocks\":{}}},\"blocks\":",
      info.num_blocks, info.block_size, info.max_num_seqs, info.max_num_batched_tokens,
      info.max_model_len, s.steps, s.step_seconds, s.prompt_tokens, s.cached_prompt_tokens,
      s.generated_tokens, s.preemptions, s.running, s.waiting, s.free_blocks);
  size_t runs_left = kMostBlocks;
  append_runs(out, snapshot.blocks, std::min(snapshot.blocks.size(), kMostBlocks), runs_left,
              [](BlockState a, BlockState b) { return a == b; });
  runs_left = kMostRuns;
  out += ",\"running\":[";
  append_sequences(out, snapshot.running, runs_left);
  out += "],\"waiting\":[";
  append_sequences(out, snapshot.waiting, runs_left);
  return out + "]}";
}

Live::Live(std::string model, HttpServer& http, AsyncLLM& llm)
    : model_(std::move(model)), http_(http), llm_(llm) {}

std::optional<HttpResponse> Live::watch(const HttpRequest& request,
                                        const std::shared_ptr<Exchange>& exchange) {
  if (request.method == "HEAD") return HttpResponse{.content_type = "text/event-stream"};
  if (watchers_.size() == kMostWatchers)
    return error_response(503, fmt::format("{} clients watch already", kMostWatchers));
  const int64_t id = next_watcher_++;
  watchers_[id] = exchange;
  exchange->begin_stream({});
  exchange->on_abandoned([this, id] { watchers_.erase(id); });
  last_.clear();  // the new one gets an update at once
  if (!std::exchange(is_ticking_, true)) http_.every(kPeriod, [this] { return ask(); });
  return std::nullopt;
}

/// Whether to go on.
bool Live::ask() {
  is_ticking_ = !watchers_.empty();
  if (!is_ticking_ || is_asked_) return is_ticking_;
  is_asked_ = true;
  llm_.request_snapshot(kMostSequences, [this](EngineSnapshot snapshot) {
    auto shared = std::make_shared<EngineSnapshot>(std::move(snapshot));
    http_.post([this, shared] { send(*shared); });
  });
  return true;
}

void Live::send(const EngineSnapshot& snapshot) {
  is_asked_ = false;
  std::string json = live_json(model_, llm_.llm().info(), snapshot);
  if (json == last_ && seconds_since(sent_) < 1) return;
  last_ = std::move(json);
  sent_ = Clock::now();
  const auto watchers = watchers_;  // one that does not read may be cut off meanwhile
  for (const auto& [id, exchange] : watchers) exchange->write("data: " + last_ + "\n\n");
}

}  // namespace nanovllm::server
