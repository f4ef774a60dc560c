#include "ops/staged_load.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace nanovllm {
namespace {

/// Elements [begin, end) of one weight's destination.
struct Chunk {
  size_t weight;
  int64_t begin, end;
};

/// A host tensor as rows of dense elements: [n, k] with any row stride, or anything contiguous as
/// one row.
struct Rows {
  int64_t length, stride;  // in elements
  explicit Rows(const Tensor& t) {
    const bool matrix = t.rank == 2 && (t.stride[1] == 1 || t.shape[1] == 1) && !t.contiguous();
    check(matrix || t.contiguous(), "load: {} is neither contiguous nor a matrix with dense rows",
          t.describe());
    length = matrix ? t.shape[1] : t.numel();
    stride = matrix ? t.stride[0] : length;
  }
};

void check_fit(const WeightSource& weight) {
  const Tensor& dst = weight.dst;
  int64_t stacked = 0;
  for (const Tensor& part : weight.parts) {
    bool fits = part.rank == dst.rank;
    for (size_t axis = 1; fits && axis < static_cast<size_t>(dst.rank); ++axis)
      fits = part.shape[axis] == dst.shape[axis];
    check(fits, "load: {} is no part of {}", part.describe(), dst.describe());
    stacked += part.shape[0];
  }
  check(dst.rank > 0 && dst.contiguous() && stacked == dst.shape[0], "load: {} rows into {}",
        stacked, dst.describe());
}

template <class To, class From>
void convert(std::byte* to, const std::byte* from, int64_t count) {
  To* out = reinterpret_cast<To*>(to);
  for (int64_t i = 0; i < count; ++i) {
    From value;  // at any byte address: a mapped file aligns nothing
    std::memcpy(&value, from + static_cast<size_t>(i) * sizeof(From), sizeof value);
    out[i] = static_cast<To>(static_cast<float>(value));
  }
}

void convert(std::byte* to, DType target, const std::byte* from, DType source, int64_t count) {
  dispatch_float(target, [&]<class To>() {
    switch (source) {
      case DType::f32:
        return convert<To, float>(to, from, count);
      case DType::f16:
        return convert<To, f16>(to, from, count);
      case DType::bf16:
        return convert<To, bf16>(to, from, count);
      default:
        fail(ErrorKind::engine, "load: {} to {}", name_of(source), name_of(target));
    }
  });
}

/// `count` elements of dtype `source` that lie at `from`, as dtype `target` to `to`.
void take(const SourceReader& read, std::byte* to, DType target, const std::byte* from,
          DType source, int64_t count) {
  if (source == target) return read({to, static_cast<size_t>(count) * size_of(target)}, from);
  std::array<std::byte, 64 * 1024> raw;  // stays in the first-level caches
  const auto most = static_cast<int64_t>(raw.size() / size_of(source));
  for (int64_t done = 0; done < count;) {
    const int64_t n = std::min(most, count - done);
    const size_t bytes = static_cast<size_t>(n) * size_of(source);
    read({raw.data(), bytes}, from);
    convert(to, target, raw.data(), source, n);
    from += bytes;
    to += static_cast<size_t>(n) * size_of(target);
    done += n;
  }
}

/// The elements of `chunk`, which may begin and end inside any part, to `buffer`.
void fill(const WeightSource& weight, const Chunk& chunk, const SourceReader& read,
          std::byte* buffer) {
  const DType target = weight.dst.dtype;
  int64_t first = 0;  // of the part, in the destination
  for (const Tensor& part : weight.parts) {
    const int64_t last = first + part.numel();
    const Rows rows(part);
    for (int64_t at = std::max(first, chunk.begin); at < std::min(last, chunk.end);) {
      const int64_t row = (at - first) / rows.length, column = (at - first) % rows.length;
      const int64_t n = std::min(rows.length - column, chunk.end - at);
      const auto offset = static_cast<size_t>(row * rows.stride + column);
      take(read, buffer + static_cast<size_t>(at - chunk.begin) * size_of(target), target,
           part.data + offset * size_of(part.dtype), part.dtype, n);
      at += n;
    }
    first = last;
  }
}

void pass(const WeightSource& weight, const Chunk& chunk, const SourceReader& read,
          StagingBuffer& staging) {
  const size_t size = size_of(weight.dst.dtype);
  std::byte* buffer = staging.next_buffer();
  fill(weight, chunk, read, buffer);
  staging.send(weight.dst.data + static_cast<size_t>(chunk.begin) * size,
               static_cast<size_t>(chunk.end - chunk.begin) * size);
}

void cut(const WeightSource& weight, size_t index, size_t buffer_bytes, std::vector<Chunk>& into) {
  check_fit(weight);
  const int64_t total = weight.dst.numel();
  const auto most = static_cast<int64_t>(buffer_bytes / size_of(weight.dst.dtype));
  for (int64_t begin = 0; begin < total; begin += most)
    into.push_back({index, begin, std::min(begin + most, total)});
}

/// The threads of one load, and what they share.
class Crew {
 public:
  Crew(const StagedLoad& how, std::span<const WeightSource> weights, const SourceReader& read)
      : how_(how), weights_(weights), read_(read), left_(weights.size(), 0) {
    for (size_t i = 0; i < weights.size(); ++i) {
      cut(weights[i], i, how.buffer_bytes, chunks_);
      if (weights[i].dst.numel() == 0) read_weights_.push_back(i);
    }
    for (const Chunk& chunk : chunks_) ++left_[chunk.weight];
    running_ = std::clamp(how.threads, 1, std::max(1, static_cast<int>(chunks_.size())));
    for (int i = 0, count = running_; i < count; ++i) threads_.emplace_back([this] { work(); });
  }
  ~Crew() { stop_ = true; }

  void wait(const std::function<void(size_t)>& loaded) {
    for (std::unique_lock lock(mutex_);;) {
      changed_.wait(lock, [&] { return running_ == 0 || !read_weights_.empty(); });
      std::vector<size_t> ready;
      ready.swap(read_weights_);
      if (ready.empty()) break;
      lock.unlock();
      for (const size_t i : ready) loaded(i);
      lock.lock();
    }
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  void work() {
    std::exception_ptr failure;
    try {
      const auto staging = how_.open_staging();
      for (size_t i; !stop_ && (i = next_++) < chunks_.size();) {
        pass(weights_[chunks_[i].weight], chunks_[i], read_, *staging);
        was_read(chunks_[i].weight);
      }
      staging->finish();
    } catch (...) {
      failure = std::current_exception();
      stop_ = true;
    }
    const std::lock_guard lock(mutex_);
    if (failure && !failure_) failure_ = failure;
    --running_;
    changed_.notify_one();
  }
  void was_read(size_t weight) {
    const std::lock_guard lock(mutex_);
    if (--left_[weight] > 0) return;
    read_weights_.push_back(weight);
    changed_.notify_one();
  }

  const StagedLoad& how_;
  const std::span<const WeightSource> weights_;
  const SourceReader& read_;
  std::vector<Chunk> chunks_;
  std::atomic<size_t> next_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::vector<size_t> left_;          // chunks of each weight that are not read
  std::vector<size_t> read_weights_;  // whole weights, not reported yet
  int running_ = 0;
  std::exception_ptr failure_;
  std::vector<std::jthread> threads_;  // last: joined before anything they use goes
};

}  // namespace

void load_staged(const StagedLoad& how, std::span<const WeightSource> weights,
                 const SourceReader& read, const std::function<void(size_t)>& loaded) {
  Crew(how, weights, read).wait(loaded);
}

void load_staged(StagingBuffer& staging, size_t buffer_bytes, const WeightSource& weight,
                 const SourceReader& read) {
  std::vector<Chunk> chunks;
  cut(weight, 0, buffer_bytes, chunks);
  for (const Chunk& chunk : chunks) pass(weight, chunk, read, staging);
}

}  // namespace nanovllm
