// Arena: step-scoped tensors bumped out of one block of memory. No malloc, no free, no lock inside
// a step.
//
// Sized by a dry run: an Arena without memory (`Arena::measuring()`) hands out undefined tensors
// and records the peak, so the same code that runs a step tells in closed form how much it needs.
#pragma once

#include <algorithm>

#include "core/tensor.h"

namespace nanovllm {

/// Hands out tensors one behind the other; does not own their memory.
class Arena {
 public:
  static constexpr size_t kAlignment = 256;  // bytes; what cuBLASLt and 128-bit loads want

  Arena(std::byte* data, size_t capacity, Device device)
      : data_(data), capacity_(capacity), device_(device) {}
  /// Has no memory and no end: its peak() tells how much a step takes.
  static Arena measuring(Device device) { return {nullptr, ~size_t{0}, device}; }

  /// A contiguous tensor, alive until release() of an earlier mark. Throws when full: a bug in the
  /// plan, not a condition to handle.
  Tensor take(DType dtype, std::initializer_list<int64_t> shape) {
    Tensor t(nullptr, dtype, shape, device_);
    const size_t bytes = (t.bytes() + kAlignment - 1) / kAlignment * kAlignment;
    check(bytes <= capacity_ - used_,
          "step workspace is full: {} of {} bytes used, {} more wanted for {}", used_, capacity_,
          bytes, t);
    if (data_) t.data = data_ + used_;
    used_ += bytes;
    peak_ = std::max(peak_, used_);
    return t;
  }
  /// The memory not taken, as an arena of its own: valid until this one hands out more. Its peak
  /// says what to take here to keep it.
  Arena rest() const { return {data_ ? data_ + used_ : nullptr, capacity_ - used_, device_}; }
  size_t mark() const { return used_; }        ///< for release(): what is taken so far stays
  void release(size_t mark) { used_ = mark; }  ///< gives back all that was taken since
  size_t peak() const { return peak_; }        ///< bytes: the most that was ever taken

 private:
  std::byte* data_;
  size_t capacity_, used_ = 0, peak_ = 0;
  Device device_;
};

/// Gives back, at the end of a scope, what was taken in it.
class ArenaScope {
 public:
  explicit ArenaScope(Arena& arena) : arena_(arena), mark_(arena.mark()) {}
  ~ArenaScope() { arena_.release(mark_); }
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

 private:
  Arena& arena_;
  size_t mark_;
};

}  // namespace nanovllm
