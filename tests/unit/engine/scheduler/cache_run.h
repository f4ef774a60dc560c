// Random requests through a Scheduler whose prefix cache is small: prompts that share prefixes,
// evictions, preemptions, broken logits, aborts and resets, two steps in flight. Every block holds
// one of three contents, so that all that a prompt could find can be asked for.
#pragma once

#include <deque>
#include <map>
#include <set>
#include <string>

#include "unit/engine/scheduler/model_based.h"
#include "unit/engine/scheduler/scheduler_rig.h"

namespace nanovllm {

class CacheRun {
 public:
  static constexpr int kBlockSize = 4;

  explicit CacheRun(uint64_t seed) : random_(seed), scheduler_(small_config(40, kBlockSize)) {
    scheduler_.record_events();
  }

  void step() {
    if (random_.chance(0.5)) add();
    if (random_.chance(0.03))
      scheduler_.finish(next_id_ - 1 - random_.below(8), FinishReason::abort);
    if (random_.chance(0.003)) scheduler_.reset_prefix_cache();
    Plan plan = scheduler_.schedule();
    const bool planned = !plan.empty();
    if (planned) plans_.push_back(std::move(plan));
    if (!plans_.empty() && (!planned || plans_.size() == 2)) process();
    for (const auto& sequence : scheduler_.take_finished()) contents_.erase(sequence->request_id);
  }

  std::vector<BlockEvent> take_events() { return scheduler_.take_events(); }

  /// Every prefix that the cache has, a letter for each block; one for each salt.
  std::multiset<std::string> cached() const {
    std::multiset<std::string> prefixes;
    for (const char* salt : kSalts) find_all(BlockManager::kNone, "", salt, prefixes);
    return prefixes;
  }

 private:
  static constexpr const char* kSalts[] = {"", "pepper"};
  static constexpr int kContents = 3, kMaxPrompt = 24, kMaxTokens = 12;

  void add() {
    const int64_t id = next_id_++;
    std::string& contents = contents_[id];
    while (std::ssize(contents) * kBlockSize < kMaxPrompt + kMaxTokens)
      contents += static_cast<char>('a' + (random_.chance(0.7) ? 0 : random_.below(kContents)));
    Tokens prompt;
    for (int64_t i = 0, length = random_.between(1, kMaxPrompt); i < length; ++i)
      prompt.push_back(contents[static_cast<size_t>(i / kBlockSize)]);
    auto sequence = make_sequence(id, std::move(prompt), random_.between(1, kMaxTokens));
    sequence->params.cache_salt = kSalts[random_.chance(0.3)];
    scheduler_.add(std::move(sequence));
  }

  void process() {
    Tokens sampled;
    for (const ScheduledSequence& entry : plans_.front().sequences) {
      if (!entry.samples) continue;
      const auto position = static_cast<size_t>(entry.start + entry.num_tokens);
      const int32_t token = contents_.at(entry.sequence->request_id)[position / kBlockSize];
      sampled.push_back(random_.chance(0.01) ? -1 : token);
    }
    scheduler_.process(plans_.front(), sampled);
    plans_.pop_front();
  }

  void find_all(int32_t parent, const std::string& prefix, const char* salt,
                std::multiset<std::string>& prefixes) const {
    for (int32_t token = 'a'; token < 'a' + kContents; ++token) {
      const int32_t block = scheduler_.blocks().find(parent, Tokens(kBlockSize, token), salt);
      if (block == BlockManager::kNone) continue;
      const std::string longer = prefix + static_cast<char>(token);
      prefixes.insert(longer);
      find_all(block, longer, salt, prefixes);
    }
  }

  Random random_;
  OwningScheduler scheduler_;
  std::map<int64_t, std::string> contents_;  // of each request's blocks, prompt and answer
  std::deque<Plan> plans_;
  int64_t next_id_ = 0;
};

}  // namespace nanovllm
