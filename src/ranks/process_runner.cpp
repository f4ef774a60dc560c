#include "ranks/process_runner.h"

#include <chrono>
#include <cstring>
#include <type_traits>

#include "comm/stopped_ranks.h"
#include "core/seconds.h"
#include "io/safetensors/checkpoint.h"
#include "ranks/open_ranks.h"

namespace nanovllm {
namespace {

/// A StepInput without its vectors; tensors point to offsets from address 0.
struct StepHeader {
  StepArrays arrays;
  size_t num_sampling = 0;
};
static_assert(std::is_trivially_copyable_v<StepHeader>);

constexpr std::chrono::milliseconds kPatience{8000}, kLastPatience{9500};
constexpr std::chrono::milliseconds kLoadPatience{60'000};  // without progress
constexpr std::chrono::milliseconds kLeavePatience{30'000};

}  // namespace

void pack_step(const StepInput& input, const std::byte* block, std::vector<std::byte>& message) {
  StepHeader header{input, input.sampling.size()};
  move_to(header.arrays, block, nullptr, {});
  message.resize(sizeof header + input.bytes);
  std::memcpy(message.data(), &header, sizeof header);
  std::memcpy(message.data() + sizeof header, block, input.bytes);
}

void unpack_step(std::span<const std::byte> message, StepInput& input, std::byte* block) {
  StepHeader header;
  std::memcpy(static_cast<void*>(&header), message.data(), sizeof header);
  static_cast<StepArrays&>(input) = header.arrays;
  input.sampling.assign(header.num_sampling, 0);  // only their number is asked for here
  input.prompt_rows.clear();
  std::memcpy(block, message.data() + sizeof header, input.bytes);
  move_to(input, nullptr, block, {});
}

std::unique_ptr<ProcessRunner> make_process_runner(std::unique_ptr<ProcessGroup> group,
                                                   std::unique_ptr<Backend> backend,
                                                   const ModelConfig& model,
                                                   const EngineConfig& config) {
  const WaitForProcesses wait("the others to open their devices", kOpenPatience);
  auto communicator = open_communicator(*backend, *group);
  MemoryPlan plan = plan_memory(*backend, model, config, compute_dtype(model, config),
                                {group->rank(), group->world_size()}, group->ranks_on_host());
  plan.num_blocks = group->smallest(plan.num_blocks);
  plan.limits.max_model_len = group->smallest(plan.limits.max_model_len);
  auto runner = std::make_unique<ModelRunner>(std::move(backend), std::move(communicator), model,
                                              config, plan);
  return std::make_unique<ProcessRunner>(std::move(group), std::move(runner));
}

ProcessRunner::ProcessRunner(std::unique_ptr<ProcessGroup> group,
                             std::unique_ptr<ModelRunner> runner)
    : group_(std::move(group)),
      runner_(std::move(runner)),
      block_(BatchBuilder(memory().limits).max_bytes()),
      masks_(memory().limits) {
  if (runner_->max_steps_in_flight() == 1) return;
  alarm_ = std::make_unique<AlarmClock>(kPatience, [this] { runner_->communicator().abort(); });
  last_alarm_ =
      std::make_unique<AlarmClock>(kLastPatience, [this] { end_process(describe_wait()); });
}

ProcessRunner::~ProcessRunner() {
  if (failed_) {  // work on the device that waits for others must not keep this process
    if (last_alarm_) last_alarm_->set();
    runner_->communicator().abort();
    return;
  }
  try {
    int64_t over = 0;
    if (group_->rank() == 0) group_->broadcast(std::as_writable_bytes(std::span(&over, 1)));
    const WatchForStoppedRanks watch("the others to end");
    const WaitForProcesses wait("the others to end", kLeavePatience);
    group_->leave();
  } catch (const std::exception&) {  // the others are gone already
  }
}

void ProcessRunner::load(const Checkpoint* checkpoint, uint64_t seed,
                         const LoadProgress& progress) {
  failed_ = true;  // until it is done
  const auto begin = std::chrono::steady_clock::now();
  WaitForProcesses wait("weights", kLoadPatience);
  runner_->load(checkpoint, seed, [&](int64_t done, int64_t total) {
    wait.go_on(kLoadPatience);
    if (progress) progress(done, total);
  });
  // No rank starts before all have loaded; others' disks may be slower.
  const auto own = std::chrono::steady_clock::now() - begin;
  wait.go_on(kLoadPatience + 3 * std::chrono::duration_cast<std::chrono::milliseconds>(own));
  group_->smallest(0);
  failed_ = false;
}

void ProcessRunner::launch(const Plan& plan) {
  failed_ = true;  // until the step is done
  ++num_in_flight_;
  const auto begin = std::chrono::steady_clock::now();
  const auto shape =
      runner_->uses_graphs() ? decode_shape(plan, memory().limits) : std::optional<StepShape>();
  BatchBuilder(memory().limits).build(plan, block_.data(), input_, shape);
  pack_step(input_, block_.data(), message_);
  build_seconds_ += seconds_since(begin);
  send(std::ssize(message_));
  launch_built();
}

void ProcessRunner::finish_launch(const Plan& plan) {
  const auto begin = std::chrono::steady_clock::now();
  message_.resize(input_.token_mask_bytes(memory().limits));
  masks_.fill(plan, input_, message_.data());
  build_seconds_ += seconds_since(begin);
  send(-std::ssize(message_));
  finish_filled();
}

// The message, after its length: that of a step, or, below 0, of the masks of the step before.
void ProcessRunner::send(int64_t length) {
  group_->broadcast(std::as_writable_bytes(std::span(&length, 1)));
  group_->broadcast(message_);
}

// A device that waits for others can make its driver wait: to load a kernel, or to record a step.
void ProcessRunner::launch_built() {
  guarded([this] { runner_->launch(input_, block_.data()); });
}

void ProcessRunner::finish_filled() {
  guarded([this] { runner_->finish_launch(message_.data()); });
}

void ProcessRunner::guarded(const std::function<void()>& body) {
  const auto stop = [](AlarmClock* alarm) { alarm->stop(); };
  const std::unique_ptr<AlarmClock, decltype(stop)> alarm(last_alarm_.get(), stop);
  if (alarm) alarm->set();
  body();
}

std::string ProcessRunner::describe_wait() const {
  return fmt::format(
      "rank {} of {} has waited {} s for its device to finish a step: {}", group_->rank(),
      group_->world_size(), kPatience.count() / 1000,
      describe_missing_ranks("another rank hangs, or the step is too large for the network"));
}

StepResult ProcessRunner::wait() {
  const StepResult result = finish_step();
  failed_ = num_in_flight_ > 0;
  return result;
}

StepResult ProcessRunner::finish_step() {
  if (alarm_) alarm_->set();
  if (last_alarm_) last_alarm_->set();
  const StepResult result = runner_->wait();
  check(!alarm_ || !alarm_->stop(), "{}", describe_wait());  // and the last one stays set
  if (last_alarm_) last_alarm_->stop();
  --num_in_flight_;
  return result;
}

void ProcessRunner::serve() {
  failed_ = true;
  // Rank 0 watches for the others: it can tell its requests.
  const WatchForStoppedRanks watch("the next step", 0);
  bool needs_masks = false;  // the newest step
  for (;;) {
    int64_t bytes = 0;
    // Where rank 0 gives nothing more to do, the steps under way must still come to their end.
    group_->await_broadcast(std::as_writable_bytes(std::span(&bytes, 1)), [this, &needs_masks] {
      while (num_in_flight_ > (needs_masks ? 1 : 0)) finish_step();
    });
    if (bytes == 0) break;
    message_.resize(static_cast<size_t>(std::abs(bytes)));
    group_->broadcast(message_);
    if (bytes < 0) {
      finish_filled();
      needs_masks = false;
      continue;
    }
    unpack_step(message_, input_, block_.data());
    if (num_in_flight_ == max_steps_in_flight()) finish_step();
    launch_built();
    ++num_in_flight_;
    needs_masks = input_.num_token_masks > 0;
  }
  while (num_in_flight_ > 0) finish_step();
  failed_ = false;
}

std::string ProcessRunner::device_name() const {
  return fmt::format("{} processes, {} each", group_->world_size(), runner_->device_name());
}

}  // namespace nanovllm
