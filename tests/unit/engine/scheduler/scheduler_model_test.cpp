// Long runs of random operations on the Scheduler, with every invariant checked. What should come
// out is the FakeRunner's function of each request's plain history.
#include <algorithm>
#include <map>
#include <set>

#include <gtest/gtest.h>

#include "unit/engine/scheduler/model_based.h"
#include "unit/engine/scheduler/scheduler_rig.h"

namespace nanovllm {
namespace {

SchedulerConfig random_config(Random& random, uint64_t hash_mask) {
  SchedulerConfig config;
  config.block_size = 1 << random.below(5);
  config.num_blocks = random.between(1, 64);
  config.max_model_len = random.between(2, 80);
  config.max_num_seqs = random.between(1, 8);
  config.max_num_batched_tokens = random.between(1, random.chance(0.5) ? 8 : 100);
  config.enable_prefix_caching = random.chance(0.9);
  config.has_priorities = random.chance(0.3);
  config.max_plans_in_flight = static_cast<int>(random.between(1, 2));
  config.prefix_hash_mask = hash_mask;
  return config;
}

class SchedulerRun {
 public:
  SchedulerRun(uint64_t seed, uint64_t hash_mask)
      : random_(seed),
        config_(random_config(random_, hash_mask)),
        vocab_size_(static_cast<int>(random_.between(2, 6))),
        scheduler_(config_),
        runner_(config_.num_blocks, config_.block_size, vocab_size_) {}

  void step() {
    const int64_t dice = random_.below(1000);
    if (dice < 150) return add();
    if (dice < 180) return finish();
    if (dice < 590) return plan();
    if (dice < 990) return process();
    if (dice < 993) return scheduler_.reset_prefix_cache();
    return drain();
  }

  /// Everything that must hold between two operations.
  void compare() {
    Integrity::verify(scheduler_);
    for (auto& sequence : scheduler_.take_finished()) take(*sequence);
    for (auto& [id, request] : requests_) {
      const Sequence* s = scheduler_.find(id);
      check(s != nullptr, "request {} is lost", id);
      check(s->is_finished() || request.ended == FinishReason::none, "request {} lives on", id);
      check_tokens(*s, request);
    }
    const SchedulerStats stats = scheduler_.stats();
    check(stats.generated_tokens == num_generated_, "{} tokens generated, {} counted",
          num_generated_, stats.generated_tokens);
    check(stats.prompt_tokens <= num_prompt_tokens_, "too many prompt tokens counted");
  }

  /// Runs until nothing is left, within the number of steps that the work can take at most.
  void drain() {
    // One sequence alone advances by a token a step; it may be recomputed whenever an older one
    // ends.
    const int64_t requests = 1 + std::ssize(requests_);
    int64_t bound = 4 * requests * requests * (config_.max_model_len + 2);
    while (scheduler_.has_unfinished() || scheduler_.plans_in_flight() > 0) {
      check(--bound > 0, "{} requests do not come to an end", requests_.size());
      const int64_t in_flight = scheduler_.plans_in_flight();
      const bool had_work = scheduler_.has_unfinished();
      plan();
      check(!had_work || scheduler_.plans_in_flight() > 0 || !scheduler_.has_unfinished(),
            "there is work, nothing in flight, and an empty plan");
      if (in_flight > 0 || scheduler_.plans_in_flight() == config_.max_plans_in_flight) process();
      compare();
    }
    compare();
    check(requests_.empty(), "{} requests were never given out", requests_.size());
    const BlockManager& blocks = scheduler_.blocks();
    check(blocks.num_idle() == blocks.num_blocks(), "{} blocks leaked",
          blocks.num_blocks() - blocks.num_idle());
    if (random_.chance(0.2)) {
      scheduler_.reset_prefix_cache();
      check(blocks.num_cached() == 0, "{} blocks cached after the reset", blocks.num_cached());
    }
  }

  int64_t num_preemptions() const { return scheduler_.stats().preemptions; }
  int64_t num_cached_tokens() const { return scheduler_.stats().cached_prompt_tokens; }
  int64_t num_ended(FinishReason reason) { return num_ended_[reason]; }

 private:
  struct Request {
    std::vector<int32_t> tokens;  // the prompt and all that will follow it
    int64_t num_seen = 0;         // of them, already in the sequence
    FinishReason natural_end = FinishReason::length;
    FinishReason ended = FinishReason::none;  // from outside, or by a failed step
    bool fails = false;                       // some step gave it no finite logits
  };

  std::vector<int32_t> random_prompt() {
    std::vector<int32_t> prompt;
    if (!histories_.empty() && random_.chance(0.7)) {
      prompt = random_.pick(histories_);
      prompt.resize(static_cast<size_t>(random_.between(0, std::ssize(prompt))));
    }
    const int64_t more = random_.chance(0.3) ? 0 : random_.below(config_.max_model_len + 3);
    for (int64_t i = 0; i < more; ++i) {
      prompt.push_back(static_cast<int32_t>(random_.chance(0.8) ? 0 : random_.below(vocab_size_)));
    }
    return prompt;
  }

  void add() {
    auto sequence = std::make_unique<Sequence>();
    Sequence& s = *sequence;
    s.request_id = ++last_id_;
    s.token_ids = random_prompt();
    s.num_prompt_tokens = s.num_tokens();
    s.max_tokens = random_.between(0, config_.max_model_len);
    if (random_.chance(0.5)) {
      s.max_tokens = std::min(s.max_tokens, config_.max_model_len - s.num_tokens());
    }
    if (random_.chance(0.1)) s.params.prompt_logprobs = 0;
    if (random_.chance(0.3)) s.params.priority = random_.between(-3, 3);
    if (random_.chance(0.2)) s.params.cache_salt = random_.chance(0.5) ? "a" : "b";
    if (random_.chance(0.3)) s.params.min_tokens = random_.below(10);
    if (random_.chance(0.3)) {
      s.params.stop_token_ids = {random_.below(vocab_size_)};
      s.stop_token_ids = {static_cast<int32_t>(s.params.stop_token_ids[0])};
    }
    const int64_t positions = s.num_tokens() + s.max_tokens - 1;
    const bool feasible = s.num_tokens() >= 1 && s.max_tokens >= 1 &&
                          s.num_tokens() + s.max_tokens <= config_.max_model_len &&
                          positions <= config_.num_blocks * config_.block_size;
    const auto refusal = scheduler_.refusal(s.num_prompt_tokens, s.max_tokens);
    check(feasible == !refusal.has_value(), "prompt {}, max_tokens {}: {}", s.num_tokens(),
          s.max_tokens, refusal.value_or("not refused"));
    if (!feasible) return;

    Request request;
    const auto output = expected_output(s, vocab_size_);
    if (std::ranges::count(s.stop_token_ids, output.back()) > 0 &&
        std::ssize(output) >= s.params.min_tokens) {
      request.natural_end = FinishReason::stop;
    }
    request.tokens = s.token_ids;
    request.num_seen = s.num_tokens();
    request.tokens.insert(request.tokens.end(), output.begin(), output.end());
    histories_.push_back(request.tokens);
    if (histories_.size() > 8) histories_.erase(histories_.begin());
    num_prompt_tokens_ += s.num_tokens();
    requests_.emplace(s.request_id, std::move(request));
    scheduler_.add(std::move(sequence));
  }

  void finish() {
    const int64_t id = random_.between(-1, last_id_ + 2);
    const bool near = !requests_.empty() && random_.chance(0.8);
    finish(near ? random_.pick(requests_).first : id);
  }
  void finish(int64_t id) {
    const Sequence* s = scheduler_.find(id);
    const bool live = s && !s->is_finished();
    const auto reason = random_.chance(0.5) ? FinishReason::abort : FinishReason::stop;
    check(scheduler_.finish(id, reason, "outside") == live, "finish({}) of a {} request", id,
          live ? "live" : "dead");
    if (live) requests_.at(id).ended = reason;
    check(!scheduler_.finish(id, FinishReason::error), "request {} ended twice", id);
  }

  void plan() {
    const bool idle = scheduler_.plans_in_flight() == 0;
    const bool full = scheduler_.plans_in_flight() == config_.max_plans_in_flight;
    Plan plan = scheduler_.schedule();
    check(!plan.empty() || !idle || !scheduler_.has_unfinished(), "work, but an empty plan");
    check(plan.empty() || !full, "too many plans in flight");
    if (plan.empty()) return;
    check_plan(plan);
    runner_.launch(plan);
    plans_.push_back(std::move(plan));
  }

  void check_plan(const Plan& plan) {
    int64_t num_tokens = 0, arrival = 0;
    std::set<int64_t> ids;
    for (const ScheduledSequence& entry : plan.sequences) {
      num_tokens += entry.num_tokens;
      check(ids.insert(entry.sequence->request_id).second, "a sequence is planned twice");
      check(config_.has_priorities || entry.sequence->arrival > arrival,
            "the plan is out of order");
      arrival = entry.sequence->arrival;
    }
    check(num_tokens == plan.num_tokens && plan.num_prefill_tokens <= num_tokens, "token count");
    check(num_tokens <= config_.max_num_batched_tokens, "{} tokens planned", num_tokens);
    check(std::ssize(plan.sequences) <= config_.max_num_seqs, "{} planned", plan.sequences.size());
  }

  void process() {
    if (plans_.empty()) return;
    Plan plan = std::move(plans_.front());
    plans_.pop_front();
    auto sampled = runner_.run();
    if (!sampled.empty() && random_.chance(0.003)) poison(plan, sampled);
    scheduler_.process(plan, sampled);
  }

  // One sampling row had no finite logits.
  void poison(const Plan& plan, std::vector<int32_t>& sampled) {
    const auto victim = random_.below(std::ssize(sampled));
    sampled[static_cast<size_t>(victim)] = -1;
    int64_t row = 0;
    for (const ScheduledSequence& entry : plan.sequences) {
      if (entry.samples && row++ == victim) requests_.at(entry.sequence->request_id).fails = true;
    }
  }

  void check_tokens(const Sequence& s, Request& request) {
    check(s.num_tokens() <= std::ssize(request.tokens), "request {} has too many tokens",
          s.request_id);
    for (; request.num_seen < s.num_tokens(); ++request.num_seen, ++num_generated_) {
      const auto i = static_cast<size_t>(request.num_seen);
      check(s.token_ids[i] == request.tokens[i], "request {}: token {} is {}, expected {}",
            s.request_id, i, s.token_ids[i], request.tokens[i]);
    }
  }

  void take(const Sequence& s) {
    const auto it = requests_.find(s.request_id);
    check(it != requests_.end(), "request {} was given out twice", s.request_id);
    Request& request = it->second;
    check_tokens(s, request);
    ++num_ended_[s.finish_reason];
    if (s.finish_reason == FinishReason::error) {
      check(request.fails && !s.error.empty(), "request {} failed: {}", s.request_id, s.error);
    } else if (request.ended != FinishReason::none) {
      check(s.finish_reason == request.ended, "request {}: wrong reason", s.request_id);
    } else {
      check(s.finish_reason == request.natural_end && s.token_ids == request.tokens,
            "request {} ended with {} after {} of {} tokens", s.request_id,
            static_cast<int>(s.finish_reason), s.num_tokens(), request.tokens.size());
    }
    check(
        s.num_cached_tokens % config_.block_size == 0 && s.num_cached_tokens < s.num_prompt_tokens,
        "request {}: {} tokens from the cache", s.request_id, s.num_cached_tokens);
    check(s.num_cached_tokens == 0 || (config_.enable_prefix_caching && s.wants_cache_hits()),
          "request {} wanted no hits", s.request_id);
    requests_.erase(it);
  }

  Random random_;
  SchedulerConfig config_;
  int vocab_size_;
  OwningScheduler scheduler_;
  FakeRunner runner_;
  std::deque<Plan> plans_;
  std::map<int64_t, Request> requests_;  // not given out yet
  std::vector<std::vector<int32_t>> histories_;
  std::map<FinishReason, int64_t> num_ended_;
  int64_t last_id_ = 0, num_generated_ = 0, num_prompt_tokens_ = 0;
};

void run_scheduler(uint64_t hash_mask) {
  int64_t preemptions = 0, cached = 0;
  std::map<FinishReason, int64_t> ended;
  for (uint64_t seed = 0; seed < kNumSeeds; ++seed) {
    SchedulerRun run(seed, hash_mask);
    ASSERT_NO_FATAL_FAILURE(run_operations(run, seed));
    run.drain();
    preemptions += run.num_preemptions();
    cached += run.num_cached_tokens();
    for (const auto reason :
         {FinishReason::stop, FinishReason::length, FinishReason::error, FinishReason::abort}) {
      ended[reason] += run.num_ended(reason);
    }
  }
  // The run has been everywhere.
  EXPECT_GT(preemptions, 100);
  EXPECT_GT(cached, 1000);
  EXPECT_GT(ended[FinishReason::stop], 100);
  EXPECT_GT(ended[FinishReason::length], 100);
  EXPECT_GT(ended[FinishReason::error], 10);
  EXPECT_GT(ended[FinishReason::abort], 100);
  ::testing::Test::RecordProperty("preemptions", std::to_string(preemptions));
  ::testing::Test::RecordProperty("cached_prompt_tokens", std::to_string(cached));
}

TEST(EngineModel, EveryRequestGetsTheTokensOfItsPlainHistory) { run_scheduler(kWholeHash); }

TEST(EngineModel, EveryRequestGetsTheSameTokensWhenHashesCollide) { run_scheduler(0xf); }

}  // namespace
}  // namespace nanovllm
