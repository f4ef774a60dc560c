// Weights through staging buffers: several threads cut them into chunks of one buffer each, fill
// the buffers (converting on the way where the dtype differs) and hand them to the device. Which
// thread takes which chunk does not change a byte.
#pragma once

#include <functional>
#include <memory>
#include <span>

#include "ops/backend.h"

namespace nanovllm {

/// One thread's way to the device: a few buffers in turn, so that one is filled while another
/// travels.
struct StagingBuffer {
  virtual ~StagingBuffer() = default;
  /// A buffer that may be overwritten; waits until what was sent from it last has arrived.
  virtual std::byte* next_buffer() = 0;
  /// Sends the first `bytes` of that buffer to `target` on the device.
  virtual void send(std::byte* target, size_t bytes) = 0;
  /// Waits until everything has arrived.
  virtual void finish() = 0;
};

struct StagedLoad {
  size_t buffer_bytes = 0;  ///< of one of them
  int threads = 1;
  std::function<std::unique_ptr<StagingBuffer>()>
      open_staging;  ///< called on the thread that uses it
};

/// Fills weights as Backend::load_all() says. Throws what the first thread threw that failed; the
/// others end then.
void load_staged(const StagedLoad& how, std::span<const WeightSource> weights,
                 const SourceReader& read, const std::function<void(size_t)>& loaded);

/// The same for one weight, on the calling thread and `staging`, which may still be sending
/// afterwards.
void load_staged(StagingBuffer& staging, size_t buffer_bytes, const WeightSource& weight,
                 const SourceReader& read);

}  // namespace nanovllm
