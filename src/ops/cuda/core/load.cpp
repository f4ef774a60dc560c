// Weights: host memory (usually a file) through small pinned buffers to the device.
#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <thread>

#include <sys/mman.h>

#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/quantised/fp8_kernels.h"
#include "ops/cuda/quantised/packed.h"
#include "ops/cuda/quantised/w8a8_kernels.h"
#include "ops/staged_load.h"

namespace nanovllm {
namespace {

// Enough for a thread to fill one buffer while another travels. Pinned memory is slow to get, page
// by page: these are huge pages where the system has them, which takes a tenth of the time.
constexpr size_t kStageBytes = size_t{2} << 20;
constexpr size_t kStages = 2;
// One thread copies 5 GB/s out of the page cache, PCIe takes 55: measured on an H100's host, 8
// threads reach 40 GB/s, 12 reach 48, and 16 no more.
constexpr int kLoadThreads = 12;

/// Pinned, in huge pages if possible.
Buffer allocate_stages() {
  constexpr size_t kHugePage = size_t{2} << 20, kBytes = kStages * kStageBytes;
  static_assert(kBytes % kHugePage == 0);
  auto* data = static_cast<std::byte*>(std::aligned_alloc(kHugePage, kBytes));
  check(data != nullptr, ErrorKind::device, "no room for {} bytes of host memory", kBytes);
  (void)::madvise(data, kBytes, MADV_HUGEPAGE);  // advice: small pages do, too
  if (cudaHostRegister(data, kBytes, cudaHostRegisterDefault) != cudaSuccess) {
    (void)cudaGetLastError();
    std::free(data);
    fail(ErrorKind::device, "no room for {} bytes of pinned host memory", kBytes);
  }
  return Buffer(data, [](std::byte* p) {
    (void)cudaHostUnregister(p);
    std::free(p);
  });
}

class PinnedBuffer final : public StagingBuffer {
 public:
  /// Sends on `stream`, which outlives this.
  explicit PinnedBuffer(cudaStream_t stream) : stream_(stream), stages_(allocate_stages()) {
    for (Event& event : sent_) event = make_event();
  }
  ~PinnedBuffer() override {  // after a failure, too: the device may still be reading
    for (const Event& event : sent_) (void)cudaEventSynchronize(event.get());
  }
  std::byte* next_buffer() override {
    stage_ = (stage_ + 1) % kStages;
    cuda_check(cudaEventSynchronize(sent_[stage_].get()));  // an event never recorded is done
    return stages_.get() + stage_ * kStageBytes;
  }
  void send(std::byte* target, size_t bytes) override {
    cuda_check(cudaMemcpyAsync(target, stages_.get() + stage_ * kStageBytes, bytes,
                               cudaMemcpyHostToDevice, stream_));
    cuda_check(cudaEventRecord(sent_[stage_].get(), stream_));
  }
  void finish() override {
    for (const Event& event : sent_) cuda_check(cudaEventSynchronize(event.get()));
  }

 private:
  cudaStream_t stream_;
  Buffer stages_;
  std::array<Event, kStages> sent_;  // when the device has read a stage
  size_t stage_ = 0;
};

void read_memory(std::span<std::byte> to, const std::byte* from) {
  std::memcpy(to.data(), from, to.size());
}

/// Whether each 64 rows of w have the same scales of blocks, in both halves of a gated one as well:
/// what tiles of many rows have registers for.
bool has_whole_groups(const Fp8Layout& layout, const std::vector<float>& units) {
  constexpr int64_t kGroup = kFp8Height / kFp8Unit;
  const int64_t across = layout.units();
  for (size_t i = 0; i < units.size(); ++i)
    if (const auto unit = static_cast<int64_t>(i) % across;
        unit % kGroup != 0 && unit < layout.n / kFp8Unit && units[i] != units[i - 1])
      return false;
  return layout.n % (2 * kFp8Height) == 0 || !layout.blocks;
}

}  // namespace

// Experts that quantise rows have scales in fours of eight rows, of gates and of ups.
static_assert(kPackedExpertRows % (2 * kFp8Aligned * kFp8Unit) == 0);
bool CudaBackend::keeps(WeightFormat format, int64_t n, int64_t k, bool stacked) const {
  const int64_t group = format.group;
  if (!format.is_quantised() || n % kPackedRows != 0 || k % kPackedColumns != 0) return false;
  if (stacked && n % kPackedExpertRows != 0) return false;
  if (format.quantises_rows()) {
    const bool has_product = format.numbers == WeightFormat::int8
                                 ? k <= kMostBytesOfRow
                                 : format.numbers == WeightFormat::e4m3 && has_e4m3();
    return has_product && group == (format.rows == WeightFormat::Rows::group ? kRowGroup : k);
  }
  return k % group == 0 && (group == 32 || group == 64 || group % kPackedColumns == 0);
}

size_t CudaBackend::weight_bytes(WeightFormat format, int64_t n, int64_t k) const {
  if (format.quantises_rows()) return static_cast<size_t>(Fp8Layout(format, n, k).bytes());
  if (format.is_quantised()) {
    most_unpacked_ = std::max(most_unpacked_, static_cast<size_t>(n * k) * sizeof(bf16));
    return static_cast<size_t>(PackedLayout(format, n, k).bytes(format.has_zeros()));
  }
  return static_cast<size_t>(n) * static_cast<size_t>(k) * size_of(dtype_of(format));
}

Weight CudaBackend::weight_view(std::byte* data, WeightFormat format, int64_t n, int64_t k) const {
  Tensor t(data, dtype_of(format), {n, k}, device());
  t.packed = format.is_quantised();
  return {t, format};
}

void CudaBackend::load(Tensor dst, std::span<const Tensor> parts) {
  use_device();
  if (!staging_) staging_ = std::make_unique<PinnedBuffer>(stream());
  load_staged(*staging_, kStageBytes, {dst, {parts.begin(), parts.end()}}, read_memory);
}

bool CudaBackend::has_any(const std::set<const std::byte*>& list, const Weight& w) {
  if (!w.is_stack()) return list.contains(w.data.data);
  const std::byte* const end =
      w.data.data + w.count() * w.data.stride[0] * static_cast<int64_t>(sizeof(bf16));
  const auto first = list.lower_bound(w.data.data);
  return first != list.end() && *first < end;
}

// Matrices that lay there before may have had other sizes.
void CudaBackend::note(std::set<const std::byte*>& list, const Weight& w, bool belongs) {
  std::byte* const data = w.data.data;
  list.erase(list.lower_bound(data), list.lower_bound(data + weight_bytes(w.format, w.n(), w.k())));
  if (belongs) list.insert(data);
}

size_t CudaBackend::quantised_row_bytes(int64_t rows, int64_t columns) {
  return static_cast<size_t>(rows_with_room(rows) * (columns + columns / kFp8Block * 4));
}

void CudaBackend::reserve_quantised_rows(size_t bytes) {
  if (bytes <= room_for_quantised_) return;
  use_device();
  synchronize();
  for (MicroBatch& micro_batch : std::span(micro_batches_).first(unpacking_micro_batches()))
    micro_batch.quantised = allocate(bytes);
  room_for_quantised_ = bytes;
}

CudaBackend::QuantisedOperand CudaBackend::quantised_room(int64_t rows, const Weight& reader) {
  reserve_quantised_rows(quantised_row_bytes(rows, reader.k()));
  std::byte* const numbers = micro_batch_->quantised.get();
  return {nullptr, nullptr, numbers, numbers + rows_with_room(rows) * reader.k()};
}

void CudaBackend::load_fp8(const Weight& dst, const QuantizedRows& rows) {
  const Fp8Layout layout(dst.format, dst.n(), dst.k());
  std::vector<float> units;
  if (layout.blocks) {
    const auto groups = static_cast<size_t>(layout.k / kRowGroup),
               across = static_cast<size_t>(layout.units());
    units.resize(groups * across);
    for (size_t row = 0; row < static_cast<size_t>(layout.n); ++row)
      for (size_t group = 0; group < groups; ++group) {
        float& scale = units[group * across + row / kFp8Unit];
        if (row % kFp8Unit == 0) scale = rows.scales[row * groups + group];
        check(scale == rows.scales[row * groups + group], ErrorKind::model,
              "an FP8 weight of {} rows has scales of blocks that begin off its rows in eights: "
              "use fewer ranks",
              layout.n);
      }
  }
  note(uneven_, dst, !has_whole_groups(layout, units));
  const std::vector<float>& scales = layout.blocks ? units : rows.scales;
  cuda_check(cudaMemcpyAsync(dst.data.data, rows.numbers.data(), rows.numbers.size(),
                             cudaMemcpyHostToDevice, stream()));
  cuda_check(cudaMemcpyAsync(dst.data.data + layout.scales(), scales.data(),
                             scales.size() * sizeof(float), cudaMemcpyHostToDevice, stream()));
  input_scales_[dst.data.data] = rows.input_scale;
}

/// Whether an int4 weight unpacks in few steps (CoarseUnpack): all zero points are 0, and
/// scales are from 2^-100 to below 2^-5, with at most 8 significant bits.
static bool has_coarse_scales(const QuantizedRows& rows) {
  const auto is_coarse = [](float scale) {
    return scale >= 0x1p-100f && scale < 0x1p-5f && (std::bit_cast<uint32_t>(scale) & 0xffff) == 0;
  };
  return std::ranges::all_of(rows.scales, is_coarse) &&
         std::ranges::all_of(rows.zeros, [](int8_t zero) { return zero == 0; });
}

// Numbers, scales and zero points travel to where the weight will be unpacked, and are packed from
// there.
void CudaBackend::load_quantised(Weight dst, const QuantizedRows& rows) {
  use_device();
  if (dst.format.quantises_rows()) return load_fp8(dst, rows);
  if (room_to_unpack_ < most_unpacked_) {
    synchronize();
    for (MicroBatch& micro_batch : std::span(micro_batches_).first(unpacking_micro_batches()))
      micro_batch.unpacked = allocate(most_unpacked_);
    room_to_unpack_ = most_unpacked_;
  }
  std::byte* const room = micro_batch_->unpacked.get();
  const auto send = [&](std::byte* to, const auto& from) {
    const size_t bytes = from.size() * sizeof from[0];
    cuda_check(cudaMemcpyAsync(to, from.data(), bytes, cudaMemcpyHostToDevice, stream()));
    return to + bytes;
  };
  std::byte* const scales = send(room, rows.numbers);
  std::byte* const zeros = send(scales, rows.scales);
  (void)send(zeros, rows.zeros);
  const bool even = unpacks_evenly(dst.format, rows);
  note(uneven_, dst, !even);
  note(fine_, dst, dst.format.numbers == WeightFormat::int4 && !has_coarse_scales(rows));
  pack_weight(dst, reinterpret_cast<const int8_t*>(room), reinterpret_cast<const float*>(scales),
              dst.format.has_zeros() ? reinterpret_cast<const int8_t*>(zeros) : nullptr, even,
              stream());
}

void CudaBackend::load_all(std::span<const WeightSource> weights, const SourceReader& read,
                           const std::function<void(size_t)>& loaded) {
  StagedLoad how;
  how.buffer_bytes = kStageBytes;
  how.threads = std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, kLoadThreads);
  how.open_staging = [this] {
    use_device();
    return std::make_unique<PinnedBuffer>(stream());
  };
  load_staged(how, weights, read, loaded);
  if (has_ranks_) await_gemm_families();
}

}  // namespace nanovllm
