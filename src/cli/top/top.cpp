// nanovllm top: a server's numbers, live in a terminal.
#include <memory>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "cli/command.h"
#include "cli/exit_code.h"
#include "cli/terminal/interrupt.h"
#include "cli/terminal/output.h"
#include "cli/top/frame.h"
#include "core/check.h"
#include "core/seconds.h"
#include "server/http/http_client.h"

namespace nanovllm::cli {
namespace {

using Clock = std::chrono::steady_clock;
constexpr double kWindow = 15;  // seconds that rates look back

struct TopOptions {
  std::string url = "http://127.0.0.1:8000", api_key;
  double interval = 1;
  bool once = false;
};

class Top {
 public:
  explicit Top(const TopOptions& options)
      : options_(options),
        url_(options.url),
        redraws_(!options.once && takes_escapes(STDOUT_FILENO)) {
    if (!options.api_key.empty())
      get_.headers.emplace_back("Authorization", "Bearer " + options.api_key);
    get_.is_cancelled = [this] { return interrupt_.requested(); };
  }

  int run() {
    look();  // a server that is not there is told before the screen changes
    if (redraws_) output_.write("\x1b[?1049h\x1b[?25l");
    try {
      watch();
    } catch (...) {
      leave();
      if (!interrupt_.requested()) throw;
      return kExitDone;
    }
    leave();
    return kExitDone;
  }

 private:
  void watch() {
    if (!options_.once) show();
    while (wait()) {
      look();
      show();
      if (options_.once) return;
    }
  }

  void leave() {
    if (redraws_) output_.write("\x1b[?25h\x1b[?1049l");
    output_.flush();
  }

  /// False when the user wants to end.
  bool wait() {
    pollfd descriptor{interrupt_.descriptor(), POLLIN, 0};
    ::poll(&descriptor, 1, static_cast<int>(1000 * options_.interval));
    return !interrupt_.requested();
  }

  void look() {
    const auto answer = server::http_get(url_, "/metrics", get_);
    check(answer.status != 401, ErrorKind::invalid_argument,
          "{} wants a key: give --api-key or NANOVLLM_API_KEY", options_.url);
    check(answer.status == 200, ErrorKind::unavailable, "{}/metrics answers {}{}", options_.url,
          answer.status,
          answer.status == 503 ? ": the model is being loaded, or the server stops" : "");
    Scrape scrape(answer.body);
    check(scrape.value("vllm:num_requests_running").has_value(), ErrorKind::invalid_argument,
          "{}/metrics has no vllm:num_requests_running: no server that this command knows",
          options_.url);
    samples_.push_back({Clock::now(), std::move(scrape)});
    while (samples_.size() > 2 && seconds_since(samples_.front().time) > kWindow)
      samples_.pop_front();
    if (has_live_) look_inside();
  }

  /// The engine's picture, where the server has one.
  void look_inside() {
    server::GetOptions get = get_;
    get.until = "\n\n";
    const auto answer = server::http_get(url_, "/engine/live", get);
    has_live_ = answer.status == 200;
    const size_t begin = answer.body.find("data: "), end = answer.body.find("\n\n");
    if (!has_live_ || begin == answer.body.npos || end == answer.body.npos) return;
    live_ = parse_json(std::string_view(answer.body).substr(begin + 6, end - begin - 6),
                       "/engine/live", ErrorKind::unavailable);
  }

  void show() {
    winsize size{};
    const bool known = ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    const size_t columns = known ? size.ws_col : 80,
                 rows = known && size.ws_row > 0 ? size.ws_row : 24;
    std::vector<std::string> lines;
    try {
      lines = frame(options_.url, samples_, live_, columns, rows);
    } catch (const Json::exception&) {
      fail(ErrorKind::unavailable, "{}/engine/live does not answer as this program's server does",
           options_.url);
    }
    if (redraws_) output_.write("\x1b[H");
    for (size_t i = 0; i < lines.size(); ++i) {
      output_.write(lines[i]);
      if (redraws_) output_.write("\x1b[K");
      if (!redraws_ || i + 1 < lines.size()) output_.write(redraws_ ? "\r\n" : "\n");
    }
    if (redraws_) output_.write("\x1b[J");
    output_.flush();
  }

  const TopOptions& options_;
  const server::Url url_;
  const bool redraws_;
  Interrupt interrupt_;
  Output output_;
  server::GetOptions get_;
  std::deque<Sample> samples_;
  Json live_;
  bool has_live_ = true;
};

}  // namespace

void add_top(CLI::App& program, Action& action) {
  auto options = std::make_shared<TopOptions>();
  CLI::App& command = add_command(program, "top", "Watch a server: its numbers, live");
  TopOptions& o = *options;
  add_argument(command, "URL", "the server (http://127.0.0.1:8000)",
               [&o](const std::string& s) { o.url = s; });
  add_value(command, "--api-key", "KEY", "the server's key",
            [&o](const std::string& s) { o.api_key = s; });
  add_value(command, "--interval", "S", "seconds between two looks (1)",
            [&o](const std::string& s) {
              o.interval = parse_number(s);
              check(o.interval >= 0.1 && o.interval <= 3600, ErrorKind::invalid_argument,
                    "must be from 0.1 to 3600 seconds, got {}", s);
            });
  add_flag(command, "--once", o.once, "print what one interval brought, and end");
  set_action(command, action, [options] { return Top(*options).run(); });
}

}  // namespace nanovllm::cli
