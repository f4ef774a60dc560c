#include "cli/top/frame.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/terminal/table.h"
#include "core/seconds.h"

namespace nanovllm::cli {
namespace {

constexpr std::string_view kLetters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// "0.85 ms", "12 ms", "3.4 s"; "-" where there is none.
std::string time_text(std::optional<double> seconds) {
  if (!seconds) return "-";
  if (*seconds < 0.00995) return fmt::format("{:.2f} ms", 1000 * *seconds);
  if (*seconds < 0.9995) return fmt::format("{:.0f} ms", 1000 * *seconds);
  return fmt::format("{:.1f} s", *seconds);
}

std::string whole(double value) { return with_commas(static_cast<int64_t>(std::llround(value))); }

std::string bar(double share, size_t width) {
  const auto full =
      static_cast<size_t>(std::clamp(share, 0.0, 1.0) * static_cast<double>(width) + 0.5);
  return "[" + std::string(full, '#') + std::string(width - full, '.') + "]";
}

/// Printable ASCII: what a server says goes to a terminal.
std::string plain(std::string text) {
  for (char& c : text)
    if (c < ' ' || c > '~') c = '?';
  return text;
}

/// The change between two scrapes of one server. Counters that went back are those of a new
/// process.
class Window {
 public:
  explicit Window(const std::deque<Sample>& samples)
      : first_(samples.front()),
        last_(samples.back()),
        seconds_(to_seconds(last_.time - first_.time)) {}

  std::string rate(const std::string& name) const {
    const auto now = last_.scrape.value(name), before = first_.scrape.value(name);
    if (!now || !before || seconds_ <= 0) return "-";
    const double per_second = std::max(0.0, *now - *before) / seconds_;
    return per_second < 10 ? fmt::format("{:.1f}", per_second) : whole(per_second);
  }
  std::string times(const char* title, const std::string& name) const {
    const Buckets before = first_.scrape.buckets(name), now = last_.scrape.buckets(name);
    std::string line = fmt::format("{:<13}", title);
    for (const double q : {0.5, 0.9, 0.99})
      line += fmt::format("{:>9}", time_text(quantile(before, now, q)));
    return line;
  }
  double now(const std::string& name) const { return last_.scrape.value(name).value_or(0); }
  double share(const std::string& part, const std::string& of) const {
    const double more = now(of);
    return more > 0 ? now(part) / more : 0;
  }
  const Scrape& scrape() const { return last_.scrape; }

 private:
  const Sample &first_, &last_;
  double seconds_;
};

void add_numbers(std::vector<std::string>& lines, const Window& w, size_t columns) {
  lines.push_back(fmt::format(
      "running {}  waiting {}  preempted {}", whole(w.now("vllm:num_requests_running")),
      whole(w.now("vllm:num_requests_waiting")), whole(w.now("vllm:num_preemptions_total"))));
  lines.push_back(fmt::format("generated {:>9} tok/s", w.rate("vllm:generation_tokens_total")));
  lines.push_back(fmt::format("prompts   {:>9} tok/s", w.rate("vllm:prompt_tokens_total")));
  const std::string done = "vllm:request_success_total";
  lines.push_back(fmt::format("answers   {:>9} /s     {} failed", w.rate(done),
                              whole(w.scrape().value(done, "finished_reason=\"error\""))));
  const size_t width = std::min<size_t>(columns, 80) - 20;
  const double usage = w.now("vllm:kv_cache_usage_perc");
  lines.push_back(fmt::format("KV cache    {} {:>3.0f} %", bar(usage, width), 100 * usage));
  const double hits = w.share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total");
  lines.push_back(fmt::format("prefix hits {} {:>3.0f} %", bar(hits, width), 100 * hits));
  lines.push_back(fmt::format("{:<13}{:>9}{:>9}{:>9}", "", "p50", "p90", "p99"));
  lines.push_back(w.times("first token", "vllm:time_to_first_token_seconds"));
  lines.push_back(w.times("between two", "vllm:inter_token_latency_seconds"));
  lines.push_back(w.times("whole answer", "vllm:e2e_request_latency_seconds"));
}

/// Calls put(first, how many) for each pair of a list of runs.
template <class Put>
void for_each_run(const Json& runs, const Put& put) {
  for (size_t i = 0; i + 1 < runs.size(); i += 2)
    put(runs[i].get<size_t>(), std::min<size_t>(runs[i + 1].get<size_t>(), 1 << 20));
}

/// A character for each block: a sequence's letter, & shared, + cached, # in use, . free.
std::string block_characters(const Json& live) {
  std::string map;
  for_each_run(live.at("blocks"), [&](size_t state, size_t n) {
    map.append(std::min<size_t>(n, (size_t{1} << 20) - map.size()),
               ".+##"[std::min<size_t>(state, 3)]);
  });
  size_t index = 0;
  for (const Json& sequence : live.at("running")) {
    const char letter = kLetters[index++ % kLetters.size()];
    for_each_run(sequence.at("blocks"), [&](size_t first, size_t n) {
      for (size_t b = first; b < std::min(first + n, map.size()); ++b)
        map[b] = map[b] == '#' ? letter : '&';
    });
  }
  return map;
}

/// Blocks are taken from the front at first: those behind the last that is used are left out.
void add_map(std::vector<std::string>& lines, const Json& live, size_t columns, size_t rows) {
  const std::string map = block_characters(live);
  size_t shown = std::max<size_t>(columns * 2, map.find_last_not_of('.') + 1);
  shown = std::min(shown, map.size());
  const size_t room = columns * rows, each = std::max<size_t>(1, (shown + room - 1) / room);
  const auto size = live.at("info").at("block_size").get<int64_t>();
  lines.push_back(fmt::format("{} blocks of {} tokens{}",
                              with_commas(live.at("info").at("num_blocks").get<int64_t>()), size,
                              each > 1 ? fmt::format(", {} each", each) : ""));
  std::string line;
  for (size_t b = 0; b < shown; b += each) {
    const std::string_view group = std::string_view(map).substr(b, each);
    const size_t used = group.find_first_not_of(".+");
    const size_t cached = group.find('+');
    line += used != group.npos ? group[used] : cached != group.npos ? '+' : '.';
    if (line.size() == columns || b + each >= shown) lines.push_back(std::exchange(line, {}));
  }
  lines.push_back("A-z a sequence's  & shared  + cached");
}

void add_sequences(std::vector<std::string>& lines, const Json& live, size_t columns, size_t most) {
  size_t index = 0;
  for (const Json& s : live.at("running")) {
    if (index == most) return;
    const auto prompt = s.at("prompt").get<int64_t>(), made = s.at("generated").get<int64_t>(),
               computed = s.at("computed").get<int64_t>(), max = s.at("max").get<int64_t>();
    const bool decodes = computed >= prompt && computed >= prompt + made - 1;
    const int64_t part = decodes ? made : computed, all = decodes ? max : prompt + made;
    const double share = all > 0 ? static_cast<double>(part) / static_cast<double>(all) : 0;
    lines.push_back(fmt::format("{} {:<7} {} {}/{}", kLetters[index++ % kLetters.size()],
                                decodes ? "decode" : "prefill", bar(share, columns > 60 ? 30 : 12),
                                part, all));
  }
}

}  // namespace

std::vector<std::string> frame(const std::string& url, const std::deque<Sample>& samples,
                               const Json& live, size_t columns, size_t rows) {
  columns = std::max<size_t>(columns, 24);
  const Window window(samples);
  std::vector<std::string> lines = {
      fmt::format("{}  {}", window.scrape().label("model_name"), url)};
  add_numbers(lines, window, columns);
  if (live.is_object()) {
    const Json& stats = live.at("stats");
    const double steps = stats.at("steps").get<double>();
    if (steps > 0)
      lines.push_back(fmt::format("a step       {:>9} in the mean of {}",
                                  time_text(stats.at("step_seconds").get<double>() / steps),
                                  whole(steps)));
    const size_t left = rows > lines.size() + 6 ? rows - lines.size() - 3 : 3;
    add_map(lines, live, columns, std::min<size_t>(8, (left + 1) / 2));
    if (lines.size() < rows) add_sequences(lines, live, columns, rows - lines.size());
  }
  if (lines.size() > rows) lines.resize(rows);
  for (std::string& line : lines) line = plain(line.substr(0, columns));
  return lines;
}

}  // namespace nanovllm::cli
