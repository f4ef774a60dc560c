#include "bench/communication.h"

#include <algorithm>

#include "bench/timing.h"

namespace nanovllm::cli {

BackendDecorator StepRecorders::decorator() {
  return [this](std::unique_ptr<Backend> device) {
    auto recorder = std::make_unique<StepRecorder>(std::move(device));
    const std::lock_guard lock(mutex_);
    recorders_.push_back(recorder.get());
    return recorder;
  };
}

const std::vector<StepRecorder*>& StepRecorders::all() {
  std::ranges::sort(recorders_, {}, [](const StepRecorder* r) { return r->device().index; });
  return recorders_;
}

std::vector<Backend*> StepRecorders::devices() {
  std::vector<Backend*> devices;
  for (StepRecorder* recorder : all()) devices.push_back(&recorder->inner());
  return devices;
}

void CommunicationMeter::begin() {
  for (StepRecorder* recorder : recorders_.all()) recorder->forget_steps();
}

double CommunicationMeter::seconds_of(const std::string& kind, int64_t repetitions) {
  std::vector<const StepKind*> of_rank;
  for (StepRecorder* recorder : recorders_.all()) of_rank.push_back(&recorder->kinds().at(kind));
  const auto& collectives = of_rank[0]->collectives;
  if (collectives.empty()) return 0;
  const bool records = std::ranges::none_of(collectives, &RecordedOp::beside);
  return seconds_of_ranks(recorders_.devices(), repetitions, records, [&](size_t rank) {
    for (const RecordedOp& op : of_rank[rank]->collectives) op.run();
  });
}

CommunicationMeter::Reading CommunicationMeter::last_step(int64_t repetitions) {
  StepRecorder& first = *recorders_.all().at(0);
  const std::string* kind = first.last_kind();
  if (kind == nullptr) return {};
  return {seconds_of(*kind, repetitions), first.kinds().at(*kind).calls};
}

CommunicationMeter::Reading CommunicationMeter::all_steps() {
  Reading sum;
  for (const auto& [name, kind] : recorders_.all().at(0)->kinds()) {
    if (kind.count == 0) continue;
    if (!seconds_.contains(name)) seconds_[name] = seconds_of(name, 1);
    sum.seconds += double(kind.count) * seconds_[name];
    sum.calls += kind.count * kind.calls;
  }
  return sum;
}

}  // namespace nanovllm::cli
