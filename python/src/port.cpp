#include "port.h"

#include <cerrno>
#include <system_error>

#include <sys/eventfd.h>
#include <unistd.h>

namespace nanovllm::python {

std::vector<Port::Event> Port::one(Event&& event) {
  std::vector<Event> events;
  events.push_back(std::move(event));
  return events;
}

Port::Port() : descriptor_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (descriptor_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}
Port::~Port() { ::close(descriptor_); }

// Whoever finds the port empty wakes the loop; the others' news is taken along. mutex_ is held.
void Port::signal() {
  const uint64_t one = 1;
  (void)!::write(descriptor_, &one, sizeof one);
}

void Port::put(std::vector<Event>&& events) {
  const std::lock_guard lock(mutex_);
  if (events_.empty()) signal();
  for (Event& event : events) {
    latest_[event.id] = events_.size();
    events_.push_back(std::move(event));
  }
}

void Port::put_body(int64_t id, std::string_view bytes) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto latest = latest_.find(id); latest != latest_.end()) {
      events_[latest->second].body += bytes;
      return;
    }
  }
  put(one({.id = id, .is_answer = true, .body = std::string(bytes)}));
}

std::vector<Port::Event> Port::take() {
  std::vector<Event> events;
  const std::lock_guard lock(mutex_);
  uint64_t count = 0;
  (void)!::read(descriptor_, &count, sizeof count);
  events.swap(events_);
  latest_.clear();
  return events;
}

}  // namespace nanovllm::python
