#include "kv_events/publisher.h"

#include <string_view>

#include <dlfcn.h>

#include "core/check.h"
#include "core/load_module.h"

namespace nanovllm {

std::unique_ptr<KvEventPublisher> open_kv_events(const KvEventsConfig& config, int block_size) {
  if (!config.is_on()) return nullptr;
  std::string why = kv_events_problem();
  check(why.empty(), ErrorKind::device,
        "kv_events_config asks for events, but {}; their module is built where ZeroMQ is installed "
        "(libzmq3-dev)",
        why);
  auto publisher = make_in_module<OpenKvEventsFunction>(kKvEventsModuleFile, kKvEventsModuleEntry,
                                                        RTLD_NOW, why, config, block_size);
  check(publisher != nullptr, ErrorKind::device, "{}", why);
  return publisher;
}

std::string kv_events_problem() {
  std::string missing;
  (void)load_module(kKvEventsModuleFile, RTLD_NOW, missing);
  return missing;
}

bool is_open_to_others(const KvEventsConfig& config) {
  const auto is_local = [](std::string_view endpoint) {
    for (const char* prefix : {"tcp://127.0.0.1:", "tcp://localhost:", "tcp://[::1]:", "ipc://"})
      if (endpoint.starts_with(prefix)) return true;
    return endpoint.empty();
  };
  return !is_local(config.endpoint) || !is_local(config.replay_endpoint);
}

}  // namespace nanovllm
