#include "nanovllm/async_llm.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "core/check.h"
#include "core/seconds.h"

namespace nanovllm {

// The engine's thread owns llm_'s mutable side and the two maps of ids. Everything between the
// marks "shared" is guarded by mutex_.
class AsyncLLM::State {
 public:
  State(LLM llm, const QueueLimits& limits, Sink sink)
      : llm_(std::move(llm)), limits_(limits), sink_(std::move(sink)), stats_(llm_.stats()) {
    check(static_cast<bool>(sink_), ErrorKind::invalid_argument, "AsyncLLM needs a sink");
    thread_ = std::thread([this] { run(); });
  }
  ~State() {
    {
      const std::lock_guard lock(mutex_);
      is_ending_ = is_draining_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }

  void add(int64_t request_id, const Prompt& prompt, const SamplingParams& params,
           const RequestOptions& options) {
    Item item{.kind = Item::Kind::add,
              .id = request_id,
              .tokens = llm_.tokenize(prompt, params),
              .params = params};
    llm_.check_request(item.tokens, params);
    item.grammar = llm_.compile_grammar(params);
    check(options.timeout >= 0 && options.timeout <= kLongestTimeout, ErrorKind::invalid_argument,
          "timeout is {}: it must be between 0 (none) and {} seconds", options.timeout,
          kLongestTimeout);
    if (options.timeout > 0)
      item.deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                         std::chrono::duration<double>(options.timeout));
    const int64_t tokens = std::ssize(item.tokens) * params.n;
    {
      const std::lock_guard lock(mutex_);
      check(failure_.empty(), ErrorKind::engine, "{}", failure_);
      check(!is_draining_, ErrorKind::unavailable, "the engine is shutting down");
      check_queue(params.n, tokens);
      check(live_.insert(request_id).second, ErrorKind::invalid_argument,
            "request id {} belongs to a live request", request_id);
      offered_reqs_ += params.n;
      offered_tokens_ += tokens;
      mailbox_.push_back(std::move(item));
      const auto given = given_.extract(request_id);
      if (given && given.mapped())
        mailbox_.push_back({.kind = Item::Kind::abort, .id = request_id});
    }
    wake_.notify_one();
  }
  void abort(int64_t request_id) {
    {
      const std::lock_guard lock(mutex_);
      if (live_.count(request_id) == 0) {
        const auto given = given_.find(request_id);
        if (given != given_.end()) given->second = true;
        return;
      }
      mailbox_.push_back({.kind = Item::Kind::abort, .id = request_id});
    }
    wake_.notify_one();
  }
  void reset() { post({.kind = Item::Kind::reset, .id = 0}); }
  void request_snapshot(int64_t most, std::function<void(EngineSnapshot)> take) {
    post({.kind = Item::Kind::look, .id = most, .look = std::move(take)});
  }
  void drain() {
    const std::lock_guard lock(mutex_);
    is_draining_ = true;
  }
  bool wait_until_idle(double seconds) {
    std::unique_lock lock(mutex_);
    return idle_.wait_for(lock, std::chrono::duration<double>(std::min(seconds, kLongestTimeout)),
                          [this] { return live_.empty(); });
  }
  bool is_serving() const {
    const std::lock_guard lock(mutex_);
    return failure_.empty() && !is_draining_;
  }
  double seconds_in_step() const {
    const std::lock_guard lock(mutex_);
    return step_begin_ == Clock::time_point() ? 0 : seconds_since(step_begin_);
  }
  std::string failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
  }
  EngineStats stats() const {
    const std::lock_guard lock(mutex_);
    EngineStats stats = stats_;
    stats.waiting += offered_reqs_;
    stats.waiting_tokens += offered_tokens_;
    return stats;
  }
  int64_t num_live() const {
    const std::lock_guard lock(mutex_);
    return std::ssize(live_);
  }
  const LLM& llm() const { return llm_; }
  int64_t new_request_id() {
    const std::lock_guard lock(mutex_);
    if (given_.size() == kMaxGiven) given_.erase(given_.begin());
    given_[next_id_] = false;
    return next_id_++;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr double kLongestTimeout = 30 * 86400;  // seconds; a clock has no infinity
  static constexpr size_t kMaxGiven = 65536;

  struct Item {
    enum class Kind { add, abort, reset, look } kind;
    int64_t id;  // of a look: how many sequences
    std::vector<int32_t> tokens{};
    SamplingParams params{};
    std::shared_ptr<const Grammar> grammar{};
    Clock::time_point deadline{};  // the epoch: none
    std::function<void(EngineSnapshot)> look{};
  };

  void post(Item item) {
    {
      const std::lock_guard lock(mutex_);
      mailbox_.push_back(std::move(item));
    }
    wake_.notify_one();
  }

  /// Throws QueueFull where another request would be one too many. mutex_ is held.
  void check_queue(int64_t answers, int64_t tokens) const {
    const auto limit = [](int64_t most, int64_t have, int64_t more, QueueFull::Limit which) {
      if (most == 0 || have + more <= most) return;
      throw QueueFull(
          which,
          fmt::format(
              "the queue is full: {} of {} {} wait, this request brings {}; try again later", have,
              most, which == QueueFull::Limit::requests ? "requests" : "tokens", more));
    };
    limit(limits_.max_num_queued_reqs, stats_.waiting + offered_reqs_, answers,
          QueueFull::Limit::requests);
    limit(limits_.max_num_queued_tokens, stats_.waiting_tokens + offered_tokens_, tokens,
          QueueFull::Limit::tokens);
  }

  void run() {
    std::vector<Item> items;
    while (true) {
      {
        std::unique_lock lock(mutex_);
        step_begin_ = {};
        const auto has_work = [this] { return is_ending_ || !mailbox_.empty(); };
        if (engine_ids_.empty()) wake_.wait(lock, has_work);
        items.swap(mailbox_);
        if (is_ending_ && items.empty() && engine_ids_.empty()) return;
        if (is_ending_)
          for (const int64_t id : live_) items.push_back({.kind = Item::Kind::abort, .id = id});
        step_begin_ = Clock::now();
      }
      step(items);
      items.clear();
    }
  }

  // One round of the engine's thread: the mailbox, the deadlines, one step, one delivery.
  void step(std::vector<Item>& items) {
    std::vector<RequestOutput> outputs;
    try {
      for (Item& item : items) take(item);
      end_late_requests();
      outputs = llm_.step();
    } catch (const std::exception& error) {
      outputs = fail_all(error.what());
    }
    for (RequestOutput& output : outputs) rename(output);
    publish_stats();
    if (!outputs.empty()) sink_(outputs);
    forget_finished(outputs);
  }

  void take(Item& item) {
    if (item.kind == Item::Kind::reset) return llm_.reset_prefix_cache();
    if (item.kind == Item::Kind::look) return item.look(llm_.snapshot(item.id));
    if (item.kind == Item::Kind::abort) {
      const auto known = engine_ids_.find(item.id);
      if (known != engine_ids_.end()) llm_.abort_request(known->second);
      return;
    }
    const int64_t engine_id = llm_.add_request(item.tokens, item.params, item.grammar);
    engine_ids_[item.id] = engine_id;
    ids_[engine_id] = {item.id, item.deadline};
    if (item.deadline != Clock::time_point()) deadlines_.emplace(item.deadline, engine_id);
  }

  void end_late_requests() {
    const auto now = Clock::now();
    while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
      llm_.abort_request(deadlines_.begin()->second);
      deadlines_.erase(deadlines_.begin());
    }
  }

  // The engine's id becomes the caller's; what ends here is forgotten.
  void rename(RequestOutput& output) {
    const auto known = ids_.find(output.request_id);
    if (known == ids_.end()) return;  // fail_all() has the caller's already
    const auto [id, deadline] = known->second;
    output.request_id = id;
    if (!output.finished) return;
    const bool has_passed = deadlines_.erase({deadline, known->first}) == 0;
    if (has_passed && deadline != Clock::time_point() && output.error.empty()) {
      output.error = "the request's deadline has passed";
      output.failure = RequestFailure::deadline;
    }
    engine_ids_.erase(id);
    ids_.erase(known);
  }

  /// The last outputs of all requests, once the engine has failed.
  std::vector<RequestOutput> fail_all(const std::string& why) {
    std::vector<RequestOutput> outputs;
    const auto end = [&](int64_t id) {
      RequestOutput& output = outputs.emplace_back();
      output.request_id = id;
      output.finished = true;
      output.outputs.push_back({.finish_reason = FinishReason::error});
      output.error = why;
      output.failure = RequestFailure::engine;
    };
    const std::lock_guard lock(mutex_);
    failure_ = why;
    for (const int64_t id : live_) end(id);
    mailbox_.clear();
    engine_ids_.clear();
    ids_.clear();
    deadlines_.clear();
    return outputs;
  }

  void publish_stats() {
    const std::lock_guard lock(mutex_);
    stats_ = llm_.stats();
    offered_reqs_ = offered_tokens_ = 0;
    for (const Item& item : mailbox_) {
      if (item.kind != Item::Kind::add) continue;
      offered_reqs_ += item.params.n;
      offered_tokens_ += std::ssize(item.tokens) * item.params.n;
    }
  }

  void forget_finished(const std::vector<RequestOutput>& outputs) {
    const std::lock_guard lock(mutex_);
    for (const RequestOutput& output : outputs)
      if (output.finished) live_.erase(output.request_id);
    if (live_.empty()) idle_.notify_all();
  }

  LLM llm_;
  const QueueLimits limits_;
  const Sink sink_;

  // The engine thread's own.
  std::unordered_map<int64_t, int64_t> engine_ids_;  // the engine's by the caller's
  std::unordered_map<int64_t, std::pair<int64_t, Clock::time_point>> ids_;  // and back
  // With the engine's ids: a caller may give its own again once its request has ended.
  std::set<std::pair<Clock::time_point, int64_t>> deadlines_;

  mutable std::mutex mutex_;
  // -- shared
  std::condition_variable wake_, idle_;
  std::vector<Item> mailbox_;
  std::unordered_set<int64_t> live_;  // accepted, and no finished output delivered
  int64_t next_id_ = 0;
  std::map<int64_t, bool> given_;                  // not added yet: whether it has been aborted
  int64_t offered_reqs_ = 0, offered_tokens_ = 0;  // in the mailbox, or taken since stats_
  EngineStats stats_;
  Clock::time_point step_begin_{};  // the epoch: between two steps
  std::string failure_;
  bool is_draining_ = false, is_ending_ = false;
  // -- shared

  std::thread thread_;
};

QueueFull::QueueFull(Limit limit, const std::string& message)
    : Error(ErrorKind::unavailable, message), limit_(limit) {}

AsyncLLM::AsyncLLM(const std::string& model, const EngineConfig& config, const QueueLimits& limits,
                   Sink sink)
    : AsyncLLM(LLM(model, config), limits, std::move(sink)) {}
AsyncLLM::AsyncLLM(LLM llm, const QueueLimits& limits, Sink sink)
    : state_(std::make_unique<State>(std::move(llm), limits, std::move(sink))) {}
AsyncLLM::~AsyncLLM() = default;

int64_t AsyncLLM::new_request_id() { return state_->new_request_id(); }
void AsyncLLM::add_request(int64_t request_id, const Prompt& prompt, const SamplingParams& params,
                           const RequestOptions& options) {
  state_->add(request_id, prompt, params, options);
}
void AsyncLLM::abort_request(int64_t request_id) { state_->abort(request_id); }
void AsyncLLM::reset_prefix_cache() { state_->reset(); }
void AsyncLLM::request_snapshot(int64_t most, std::function<void(EngineSnapshot)> take) {
  state_->request_snapshot(most, std::move(take));
}
void AsyncLLM::drain() { state_->drain(); }
bool AsyncLLM::wait_until_idle(double seconds) { return state_->wait_until_idle(seconds); }
bool AsyncLLM::is_serving() const { return state_->is_serving(); }
double AsyncLLM::seconds_in_step() const { return state_->seconds_in_step(); }
std::string AsyncLLM::failure() const { return state_->failure(); }
EngineStats AsyncLLM::stats() const { return state_->stats(); }
int64_t AsyncLLM::num_live() const { return state_->num_live(); }
const LLM& AsyncLLM::llm() const { return state_->llm(); }

}  // namespace nanovllm
