#include "ranks/rank_group.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "core/seconds.h"
#include "io/safetensors/checkpoint.h"
#include "ranks/open_ranks.h"

namespace nanovllm {
namespace {

using Clock = std::chrono::steady_clock;

/// A batch that the ranks are about to copy, or have copied.
struct BuiltStep {
  std::vector<std::byte> block, masks;
  StepInput input;
};

}  // namespace

struct RankGroup::Rank {
  int number = 0;
  std::thread thread;
  // Guarded by the state's mutex.
  std::deque<Job> jobs;
  int64_t num_done = 0;  // jobs
  bool has_left = false, has_ended = false;
  // The progress of loading, for the thread that watches.
  std::atomic<int64_t> bytes_done = 0, bytes_total = 0;
  // The rank thread's own; the caller may read it while the rank has nothing to do.
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Communicator> comm;
  MemoryPlan plan;
  std::string device_name;
  std::unique_ptr<ModelRunner> runner;
  StepResult result;
};

/// State that the caller and the rank threads share; lives until the last of them is gone.
struct RankGroup::State {
  State(int world_size, std::chrono::milliseconds patience)
      : group(std::make_shared<ThreadGroup>(world_size, patience)) {
    for (int r = 0; r < world_size; ++r) {
      ranks.push_back(std::make_unique<Rank>());
      ranks.back()->number = r;
    }
    group->on_failure([this] {
      const std::lock_guard lock(mutex);
      failed = true;
      changed.notify_all();
    });
  }

  /// The next job of `rank`, or nothing when it is time to leave.
  Job next(Rank& rank) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return failed || stopping || !rank.jobs.empty(); });
    if (failed || rank.jobs.empty()) return {};
    Job job = std::move(rank.jobs.front());
    rank.jobs.pop_front();
    return job;
  }
  bool all(bool Rank::*flag) const {
    return std::all_of(ranks.begin(), ranks.end(), [&](const auto& r) { return (*r).*flag; });
  }
  void set(Rank& rank, bool Rank::*flag) {
    const std::lock_guard lock(mutex);
    rank.*flag = true;
    changed.notify_all();
  }

  const std::shared_ptr<ThreadGroup> group;
  std::mutex mutex;
  std::condition_variable changed;
  bool failed = false, stopping = false;
  std::vector<std::unique_ptr<Rank>> ranks;
  // A step's place is taken again when the ranks have finished it: there are never more in flight.
  std::array<BuiltStep, 2> built;
};

void RankGroup::run_rank(const std::shared_ptr<State>& state, Rank& rank) {
  const auto fail_group = [&](ErrorKind kind, const char* cause) {
    state->group->fail({rank.number, kind, cause});
  };
  try {
    while (const Job job = state->next(rank)) {
      job(rank);
      const std::lock_guard lock(state->mutex);
      ++rank.num_done;
      state->changed.notify_all();
    }
  } catch (const Error& error) {
    fail_group(error.kind(), error.what());
  } catch (const std::exception& error) {
    fail_group(ErrorKind::engine, error.what());
  } catch (...) {
    fail_group(ErrorKind::engine, "threw something that is no std::exception");
  }
  // Ranks read and write each other's memory: it goes when no rank works any more.
  try {
    if (rank.runner) rank.runner->backend().synchronize();
  } catch (const std::exception&) {  // a device that has failed does nothing more
  }
  state->set(rank, &Rank::has_left);
  {
    std::unique_lock lock(state->mutex);
    state->changed.wait(lock, [&] { return state->all(&Rank::has_left); });
  }
  rank.runner.reset();
  rank.comm.reset();
  rank.backend.reset();
  state->set(rank, &Rank::has_ended);
}

RankGroup::RankGroup(int world_size, const OpenBackend& open, const ModelConfig& model,
                     const EngineConfig& config, const RankLimits& limits)
    : limits_(limits),
      state_(std::make_shared<State>(world_size, limits.peer)),
      turn_([this] { drain(); }) {
  try {
    for (const auto& rank : state_->ranks)
      rank->thread = std::thread([state = state_, &rank = *rank] { run_rank(state, rank); });
    start(open, model, config);
  } catch (...) {
    stop();
    throw;
  }
}

void RankGroup::start(const OpenBackend& open, const ModelConfig& model,
                      const EngineConfig& config) {
  const int world = state_->group->world_size();
  const auto turn = turn_.take_all();
  post([open, model, config, group = state_->group, world](Rank& rank) {
    rank.backend = open(rank.number);
    rank.device_name = rank.backend->name();
    rank.comm = open_communicator(*rank.backend, group, rank.number);
    rank.plan = plan_memory(*rank.backend, model, config, compute_dtype(model, config),
                            {rank.number, world}, world);
  });
  finish(watch_progress({}));
  // The scheduler hands out the same blocks on all ranks.
  MemoryPlan poorest = memory(0);
  for (const auto& rank : state_->ranks) {
    const MemoryPlan& plan = rank->plan;
    poorest.num_blocks = std::min(poorest.num_blocks, plan.num_blocks);
    poorest.limits.max_model_len =
        std::min(poorest.limits.max_model_len, plan.limits.max_model_len);
  }
  poorest.limits.rows_worth_halving = state_->ranks[0]->comm->fusions().rows_worth_halving();
  post([model, config, poorest](Rank& rank) {
    rank.plan.num_blocks = poorest.num_blocks;
    rank.plan.limits = poorest.limits;
    rank.runner = std::make_unique<ModelRunner>(std::move(rank.backend), std::move(rank.comm),
                                                model, config, rank.plan);
  });
  finish(watch_progress({}));
  max_steps_in_flight_ = state_->ranks[0]->runner->max_steps_in_flight();
  uses_graphs_ = state_->ranks[0]->runner->uses_graphs();
  for (BuiltStep& step : state_->built) {
    step.block.resize(BatchBuilder(memory().limits).max_bytes());
    step.masks.resize(memory().limits.token_mask_bytes());
  }
  masks_.emplace(memory().limits);
  std::vector<std::string> devices;
  for (const auto& rank : state_->ranks)
    if (const Device device = rank->runner->backend().device(); device.kind != Device::cpu)
      devices.push_back(fmt::format("cuda:{}", device.index));
  if (!devices.empty()) turn_.join(std::move(devices));
}

RankGroup::~RankGroup() { stop(); }

void RankGroup::stop() {
  const auto turn = turn_.take_all();
  std::unique_lock lock(state_->mutex);
  state_->stopping = true;
  for (const auto& rank : state_->ranks)  // the others do not wait for one that could not start
    if (!rank->thread.joinable()) rank->has_left = rank->has_ended = true;
  state_->changed.notify_all();
  const bool ended =
      state_->changed.wait_for(lock, limits_.leave, [&] { return state_->all(&Rank::has_ended); });
  lock.unlock();
  for (const auto& rank : state_->ranks) {
    if (!rank->thread.joinable()) continue;
    if (ended)
      rank->thread.join();
    else
      rank->thread.detach();  // one hangs, and the others keep their memory for it
  }
}

void RankGroup::post(const Job& job) {
  const std::lock_guard lock(state_->mutex);
  for (const auto& rank : state_->ranks) rank->jobs.push_back(job);
  ++num_posted_;
  state_->changed.notify_all();
}

void RankGroup::finish(const Watch& watch) {
  constexpr std::chrono::milliseconds kBetweenLooks{20};
  std::unique_lock lock(state_->mutex);
  const auto all_done = [&] {
    return std::all_of(state_->ranks.begin(), state_->ranks.end(),
                       [&](const auto& rank) { return rank->num_done == num_posted_; });
  };
  while (!state_->changed.wait_for(lock, kBetweenLooks,
                                   [&] { return state_->failed || all_done(); })) {
    std::vector<int> missing;
    for (const auto& rank : state_->ranks)
      if (rank->num_done != num_posted_) missing.push_back(rank->number);
    lock.unlock();
    watch(missing);
    lock.lock();
  }
  if (!state_->failed) return;
  lock.unlock();
  const RankFailure failure = *state_->group->failure();
  throw Error(failure.kind, describe(failure, state_->group->world_size()));
}

void RankGroup::drain() {
  post([](Rank& rank) { rank.runner->backend().synchronize(); });
  std::unique_lock lock(state_->mutex);
  const auto busy = [&] {
    return std::find_if(state_->ranks.begin(), state_->ranks.end(),
                        [&](const auto& rank) { return rank->num_done != num_posted_; });
  };
  const auto none = state_->ranks.end();
  if (state_->changed.wait_for(lock, limits_.peer,
                               [&] { return state_->failed || busy() == none; }))
    return;
  const int missing = (*busy())->number;
  lock.unlock();
  fail_hung(missing, "another engine waits for its device");
}

void RankGroup::fail_hung(int rank, std::string cause) {
  state_->group->fail({rank, ErrorKind::engine, "hangs: " + std::move(cause)});
}

RankGroup::Watch RankGroup::watch_progress(const LoadProgress& progress) {
  const size_t world = state_->ranks.size();
  return [this, progress, seen = std::vector<int64_t>(world, 0),
          since = std::vector<Clock::time_point>(world, Clock::now())](
             const std::vector<int>& missing) mutable {
    const auto now = Clock::now();
    int64_t done = 0, total = 0;
    for (size_t r = 0; r < seen.size(); ++r) {
      const int64_t bytes = state_->ranks[r]->bytes_done;
      if (bytes != seen[r]) since[r] = now;
      done += seen[r] = bytes;
      total += state_->ranks[r]->bytes_total;
    }
    if (progress && total > 0) progress(done, total);
    for (const int r : missing)
      if (now - since[static_cast<size_t>(r)] > limits_.load)
        return fail_hung(r, fmt::format("no progress in loading for {:.1f} s",
                                        to_seconds(now - since[static_cast<size_t>(r)])));
  };
}

std::optional<int> RankGroup::last_of_ranks() const {
  const std::lock_guard lock(state_->mutex);
  const auto [least, most] =
      std::minmax_element(state_->ranks.begin(), state_->ranks.end(),
                          [](const auto& a, const auto& b) { return a->num_done < b->num_done; });
  return (*least)->num_done < (*most)->num_done ? std::optional((*least)->number) : std::nullopt;
}

RankGroup::Watch RankGroup::watch_step() {
  return [this, begin = Clock::now(),
          since = std::optional<Clock::time_point>()](const std::vector<int>& missing) mutable {
    const auto now = Clock::now();
    const std::optional<int> last = last_of_ranks();
    if (!last) since.reset();
    if (last && !since) since = now;
    if (since && now > *since + limits_.peer)
      fail_hung(*last, fmt::format("the other ranks have been done for {:.1f} s",
                                   to_seconds(now - *since)));
    // Devices that work on their own are waited for in one place, and fast: a step has an end.
    else if (max_steps_in_flight_ > 1 && now > begin + limits_.step)
      fail_hung(missing.front(),
                fmt::format("its step has taken {:.1f} s", to_seconds(now - begin)));
  };
}

void RankGroup::load(const std::shared_ptr<const Checkpoint>& checkpoint, uint64_t seed,
                     const LoadProgress& progress) {
  post([checkpoint, seed, group = state_->group](Rank& rank) {
    rank.runner->load(checkpoint.get(), seed, [&](int64_t done, int64_t total) {
      rank.bytes_total = total;
      rank.bytes_done = done;
      check(!group->failure(), "stopped");  // another rank failed: its reason counts
    });
  });
  const Watch watch = watch_progress(progress);
  try {
    finish(watch);
    watch({});     // all of it
  } catch (...) {  // also what `progress` throws: the ranks need not go on
    state_->group->fail({0, ErrorKind::engine, "loading was stopped"});
    throw;
  }
}

void RankGroup::launch(const Plan& plan) {
  const auto begin = Clock::now();
  BuiltStep& step = state_->built[static_cast<size_t>(num_built_++) % state_->built.size()];
  const auto shape =
      uses_graphs_ ? decode_shape(plan, memory().limits) : std::optional<StepShape>();
  BatchBuilder(memory().limits).build(plan, step.block.data(), step.input, shape);
  build_seconds_ += seconds_since(begin);
  const auto turn = turn_.take();
  post([&step](Rank& rank) { rank.runner->launch(step.input, step.block.data()); });
}

void RankGroup::finish_launch(const Plan& plan) {
  const auto begin = Clock::now();
  BuiltStep& step = state_->built[static_cast<size_t>(num_built_ - 1) % state_->built.size()];
  masks_->fill(plan, step.input, step.masks.data());
  build_seconds_ += seconds_since(begin);
  const auto turn = turn_.take();
  post([&step](Rank& rank) { rank.runner->finish_launch(step.masks.data()); });
}

StepResult RankGroup::wait() {
  post([](Rank& rank) { rank.result = rank.runner->wait(); });
  finish(watch_step());
  return state_->ranks[0]->result;
}

const MemoryPlan& RankGroup::memory(int rank) const {
  return state_->ranks[static_cast<size_t>(rank)]->plan;
}

std::string RankGroup::device_name(int rank) const {
  return state_->ranks[static_cast<size_t>(rank)]->device_name;
}

std::string RankGroup::device_name() const {
  return fmt::format("{} ranks: {}{}", state_->ranks.size(), device_name(0),
                     device_name(0) == device_name(1) ? " each" : ", ...");
}

}  // namespace nanovllm
