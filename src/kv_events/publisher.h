// KvEventPublisher: gives events of the prefix cache to the world, in vLLM's format.
//
// It lives in a module, libnanovllm-kv-events.so, which alone knows ZeroMQ and is looked for where
// events are asked for.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "nanovllm/params.h"

#include "kv_events/block_event.h"

namespace nanovllm {

inline constexpr const char* kKvEventsModuleFile = "libnanovllm-kv-events.so";
inline constexpr const char* kKvEventsModuleEntry = "nanovllm_open_kv_events";

class KvEventPublisher {
 public:
  virtual ~KvEventPublisher() = default;
  /// The events of one step. Waits only where max_queue_size batches are waiting already.
  virtual void publish(std::vector<BlockEvent> events) = 0;
  /// The endpoints, with the ports that the system chose.
  virtual std::string endpoints() const = 0;
};

/// The module's function. Returns an object for the caller to `delete`, or null with one sentence
/// in `error` (terminated, cut to `error_size`), as where `version`, the caller's module_version(),
/// is not the module's. Never throws.
using OpenKvEventsFunction = KvEventPublisher*(const char* version, const KvEventsConfig& config,
                                               int block_size, char* error, size_t error_size);

/// Null where `config` asks for no events. Throws Error(device): no module, or an endpoint that
/// cannot be had.
std::unique_ptr<KvEventPublisher> open_kv_events(const KvEventsConfig& config, int block_size);

/// Why the module cannot be used; empty where it can.
std::string kv_events_problem();

/// Whether machines other than this one can reach what `config` publishes.
bool is_open_to_others(const KvEventsConfig& config);

}  // namespace nanovllm
