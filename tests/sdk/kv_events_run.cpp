// kv_events_run EVENTS: publishes what happens in the prefix cache of random requests, and says
// every hundred batches what the cache has: {"next": sequence number, "cached": [prefix, ...]} on a
// line, a letter for each block. It goes on when it gets a line.
#include <cstdlib>
#include <iostream>

#include "kv_events/publisher.h"
#include "unit/engine/scheduler/cache_run.h"

int main(int, char** arguments) {
  using namespace nanovllm;
  const auto publisher = open_kv_events({.enable_kv_cache_events = true,
                                         .endpoint = "tcp://127.0.0.1:*",
                                         .replay_endpoint = "tcp://127.0.0.1:*",
                                         .buffer_steps = 300,
                                         .topic = "kv@here@demo"},
                                        CacheRun::kBlockSize);
  std::cout << "KV events on " << publisher->endpoints() << std::endl;
  std::string line;
  std::getline(std::cin, line);
  CacheRun run(7);
  for (int64_t batches = 0, left = std::atoll(arguments[1]); left > 0;) {
    run.step();
    auto events = run.take_events();
    if (events.empty()) continue;
    for (const BlockEvent& event : events) left -= std::max<int64_t>(1, std::ssize(event.hashes));
    publisher->publish(std::move(events));
    if (++batches % 100 != 0 && left > 0) continue;
    std::string list;
    for (const std::string& prefix : run.cached())
      list += (list.empty() ? "\"" : ", \"") + prefix + '"';
    std::cout << "{\"next\": " << batches << ", \"cached\": [" << list << "]}" << std::endl;
    if (!std::getline(std::cin, line)) return 1;
  }
}
