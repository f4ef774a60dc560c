// The way from the engine's and the server's threads to one event loop of Python. Those threads
// never take the GIL: they leave what they have here and signal a descriptor that the loop watches,
// so that the loop wakes up at most once a step, whatever the step brought.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "nanovllm/params.h"

#include "server/http/http.h"

namespace nanovllm::python {

class Port {
 public:
  /// News of one generate() or one openai().
  struct Event {
    int64_t id = 0;
    RequestOutput output{};  // of a generate()
    bool is_answer = false;  // of an openai(): a part of the body, and its beginning
    int status = 0;          // 0: not the beginning
    std::string content_type{}, body{};
    bool is_last = false;
  };

  /// Throws std::system_error where no descriptor is free.
  Port();
  ~Port();
  Port(const Port&) = delete;
  Port& operator=(const Port&) = delete;

  int fileno() const { return descriptor_; }
  /// All that a step brings at once: it wakes the loop once.
  void put(std::vector<Event>&& events);
  static std::vector<Event> one(Event&& event);
  /// Adds to the last part of an answer where that is still here.
  void put_body(int64_t id, std::string_view bytes);
  /// All that has come; the descriptor is quiet again.
  std::vector<Event> take();

 private:
  void signal();

  const int descriptor_;
  std::mutex mutex_;
  std::vector<Event> events_;
  std::unordered_map<int64_t, size_t> latest_;  // in events_, by id
};

}  // namespace nanovllm::python
