// The GPUs' Communicator: collectives over peer memory (peer_exchange.cuh), on the backend's
// stream.
//
// all_reduce. Everybody pushes all to everybody, and each sums for itself; or, for all but small
// messages between more than two, a rank gets and sums a part for all. Both add in the same order
// and round once: they give the same bits.
#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "ops/cuda/comm/collectives.cuh"
#include "ops/cuda/comm/communicator.h"
#include "ops/cuda/comm/copied_sums.h"
#include "ops/cuda/comm/sent_sums.cuh"

namespace nanovllm {
namespace {

constexpr int64_t kFusedBytes = 4 << 20;  // sent by a rank; above, the norm is by itself
constexpr int64_t kRowsWorthHalving = 2048;

void check_whole_vectors(const Tensor& x) {
  check(x.contiguous() && x.bytes() % 16 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0,
        "all_reduce of {}: contiguous and of whole 16 bytes", x.describe());
}

/// Whether a block has a row of x in registers, two vectors a thread at most.
bool holds_rows(const Tensor& x, const Tensor& residual, const Tensor& w) {
  const int64_t n = x.shape[1], row_bytes = n * int64_t(size_of(x.dtype));
  if (!x.contiguous() || !residual.contiguous() || row_bytes % 16 != 0 ||
      row_bytes > int64_t{row_threads(n)} * 2 * 16 || !wide_rows({x, residual, w}))
    return false;
  check(residual.shape == x.shape && w.shape[0] == n && residual.dtype == x.dtype &&
            w.dtype == x.dtype,
        "all_reduce_add_rms_norm: {} and {} with {}", x.describe(), residual.describe(),
        w.describe());
  return true;
}

/// Every rank's value.
template <class T>
std::vector<T> from_all(T own, RankMeeting& meeting, int rank) {
  meeting.show(rank, &own);
  meeting.barrier(rank);
  std::vector<T> values;
  for (int r = 0; r < meeting.world_size(); ++r)
    values.push_back(*static_cast<const T*>(meeting.shown_by(r)));
  meeting.barrier(rank);
  return values;
}

class PeerCommunicator final : public Communicator, public RankFusions {
 public:
  PeerCommunicator(CudaBackend& backend, RankMeeting& meeting, int rank);
  ~PeerCommunicator() override { backend_.set_peers(nullptr); }

  int rank() const override { return table_.rank; }
  int world_size() const override { return table_.world; }
  void all_reduce(Tensor x) override;
  void all_gather(Tensor out, Tensor parts) override;
  RankFusions& fusions() override { return *this; }
  void settle() override { meeting_.barrier(table_.rank); }
  bool gemm_for_sum(Tensor y, Tensor x, Weight w) override;
  bool all_reduce_add_rms_norm(Tensor x, Tensor residual, Tensor w, float eps,
                               Weight reader) override;
  int64_t rows_worth_halving() const override { return kRowsWorthHalving; }
  bool start_add_rms_norm(int half, Tensor x, Tensor residual, Tensor w, float eps,
                          bool whole) override {
    if (!holds_rows(x, residual, w)) return false;
    if (x.bytes() > 0) copied_sums_.start(half, x, residual, w, eps, whole);
    return true;
  }
  void finish_half(int half) override { copied_sums_.finish(half); }
  bool sums_in_decoder_layers() override;
  bool sample(Tensor token_ids, Tensor logits, int64_t vocab_size,
              const SamplingBatch& params) override {
    backend_.await_gemm_families();
    const bool sampled = backend_.sample_part(token_ids, logits, vocab_size, params);
    if (sampled) await_launches();
    return sampled;
  }

 private:
  void reach_peers(RankMeeting& meeting);
  /// Whether ranks sum a part each for all, of so many bytes that go in words.
  bool shares_sums(int64_t bytes) const {
    constexpr int64_t kToAll = 512 << 10;  // less is with everybody sooner
    return table_.world > 2 && bytes * (table_.world - 1) > kToAll;
  }
  void exchange_addresses(RankMeeting& meeting);
  /// Of the kernels that wait for other ranks, as many blocks as this GPU runs at once of each.
  int resident_blocks() const;
  /// How ranks sum rows of n columns that products send: each a share of the columns for all.
  SentSums sent_sums(int64_t n) const;
  void sum_sent(Tensor x, Tensor residual, Tensor w, float eps, const Weight& reader);
  /// sum(end) of a kernel whose rows of x, normalised, end as `reader` or, without one, x has them.
  template <class Sum>
  void sum_for(const Weight& reader, Tensor x, Sum&& sum) {
    const bool whole_warps = x.shape[1] % (int64_t{kWarp} * Vec<__nv_bfloat16>::size) == 0;
    const auto launched = [&](const auto& end) { return sum(end), true; };
    if (x.dtype == DType::bf16 && whole_warps && backend_.with_rows_for(reader, x, launched))
      return;
    dispatch_float(x.dtype, [&]<class T>() {
      sum(RowsInPlace<DeviceType<T>>{device_ptr<T>(x), x.shape[1]});
    });
  }
  /// Blocks that have a vector of 16 bytes to a thread, or several one after another.
  unsigned blocks_for(int64_t bytes) const {
    return grid_size(
        std::min(ceil_div(bytes, int64_t{16 * kSumThreads}), int64_t{table_.most_blocks}));
  }
  /// To be called behind a kernel that waits for the other ranks: returns when theirs are launched
  /// too. Until then this rank must not ask anything of the driver that waits for an idle device,
  /// such as to load a kernel: it might hold a lock that the others' launches need. Recordings are
  /// launched as a whole.
  void await_launches();
  /// Launches a kernel; `table` is its last parameter. `early`: it calls wait_for_previous().
  template <class Table, class... Parameters, class... Arguments>
  void launch_with(const Table& table, void (*kernel)(Parameters...), unsigned blocks,
                   unsigned threads, bool early, Arguments&&... arguments);
  template <class... Parameters, class... Arguments>
  void launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, bool early,
              Arguments&&... arguments) {
    launch_with(table_, kernel, blocks, threads, early, std::forward<Arguments>(arguments)...);
  }

  CudaBackend& backend_;
  RankMeeting& meeting_;
  const cudaStream_t stream_;
  PeerTable table_;
  Buffer words_, layers_, flags_, rounds_;
  /// The ranks' GPUs are of one kind, so that each takes a product, a step or a sum as the others
  /// do.
  bool alike_ = false;
  std::optional<bool> sums_in_layers_;  // sums_in_decoder_layers(), once it was asked
  SentSums sent_sums_;
  Buffer sent_memory_, sent_rounds_;
  std::byte* sent_ = nullptr;  // the result whose parts are on their way
  std::shared_ptr<int> stop_;  // pinned
  CopiedSums copied_sums_;
};

PeerCommunicator::PeerCommunicator(CudaBackend& backend, RankMeeting& meeting, int rank)
    : backend_(backend),
      meeting_(meeting),
      stream_(stream_of(*backend.make_fence())),
      copied_sums_(backend, meeting, rank, stream_) {
  table_.rank = rank;
  table_.world = meeting.world_size();
  check(table_.world <= kMaxPeers, ErrorKind::invalid_argument,
        "tensor_parallel_size {}: at most {} GPUs can work together", table_.world, kMaxPeers);
  reach_peers(meeting);
  sent_memory_ = backend.allocate(2 * kSentBytes);
  cuda_check(cudaMemsetAsync(sent_memory_.get(), 0xff, 2 * kSentBytes, stream_));  // all kAbsent
  sent_rounds_ = backend.allocate(2 * sizeof(unsigned));
  words_ = backend.allocate(PeerTable::words_bytes(table_.world));
  layers_ = backend.allocate(PeerTable::layers_bytes(table_.world));
  flags_ = backend.allocate(static_cast<size_t>(table_.world) * kExchangeBlocks * sizeof(unsigned));
  rounds_ = backend.allocate(kExchangeBlocks * sizeof(unsigned));
  backend.synchronize();  // they are zeros before anybody writes
  int* stop = nullptr;
  cuda_check(cudaMallocHost(&stop, sizeof(int)));
  *stop = 0;
  stop_ = std::shared_ptr<int>(stop, [](int* p) { (void)cudaFreeHost(p); });
  meeting.on_failure([stop = stop_] { *static_cast<volatile int*>(stop.get()) = 1; });
  table_.rounds = reinterpret_cast<unsigned*>(rounds_.get());
  table_.stop = stop_.get();
  exchange_addresses(meeting);
  backend_.set_peers(&table_);
}

/// Opens every other rank's GPU to this one.
void PeerCommunicator::reach_peers(RankMeeting& meeting) {
  const int own = backend_.device().index;
  const std::vector<int> devices = from_all(own, meeting, table_.rank);
  cuda_check(cudaSetDevice(own));
  for (const int other : devices) {
    if (other == own) continue;  // itself, or a rank beside it
    const cudaError_t status = cudaDeviceEnablePeerAccess(other, 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled)
      (void)cudaGetLastError();  // by another engine of this process
    else
      cuda_check(status);
  }
}

void PeerCommunicator::exchange_addresses(RankMeeting& meeting) {
  struct Shown {
    std::byte *words, *layers, *flags, *sent;
    CudaBackend::Kind kind;
    int most_blocks;
  } own{words_.get(),       layers_.get(),   flags_.get(),
        sent_memory_.get(), backend_.kind(), resident_blocks()};
  const std::vector<Shown> shown = from_all(own, meeting, table_.rank);
  alike_ = true;
  for (int r = 0; r < table_.world; ++r) {
    const Shown& theirs = shown[static_cast<size_t>(r)];
    table_.words[r] = theirs.words;
    table_.layers[r] = theirs.layers;
    table_.flags[r] = reinterpret_cast<unsigned*>(theirs.flags);
    sent_sums_.parts.parts[r] = theirs.sent;
    sent_sums_.sums[r] = theirs.sent + kSentBytes;
    alike_ = alike_ && theirs.kind == own.kind;
    table_.most_blocks = std::min(table_.most_blocks, theirs.most_blocks);
  }
  sent_sums_.parts.rank = table_.rank;
  sent_sums_.parts.world = table_.world;
  sent_sums_.parts.round = reinterpret_cast<unsigned*>(sent_rounds_.get());
  sent_sums_.stop = stop_.get();
}

// One rank's part of an int4 weight may have scales that registers do not unpack, and another's
// not.
bool PeerCommunicator::sums_in_decoder_layers() {
  if (!sums_in_layers_)
    sums_in_layers_ =
        alike_ && std::ranges::count(from_all(backend_.has_uneven_weights(), meeting_, table_.rank),
                                     true) == 0;
  return *sums_in_layers_;
}

int PeerCommunicator::resident_blocks() const {
  int blocks = std::min(kExchangeBlocks, backend_.resident_sampling_blocks());
  const auto take = [&](auto kernel, int threads) {
    blocks =
        std::min(blocks, backend_.resident_blocks(reinterpret_cast<const void*>(kernel), threads));
  };
  const auto take_ending = [&]<class T, class End>() {
    take(all_reduce_norm_kernel<T, 1, false, End>, kSumThreads);
    take(all_reduce_norm_kernel<T, 2, false, End>, kSumThreads);
    take(all_reduce_norm_kernel<T, 1, true, End>, kSumThreads);
    take(all_reduce_norm_kernel<T, 2, true, End>, kSumThreads);
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      take(sum_sent_norm_kernel<1, End>, kSumThreads);
      take(sum_sent_norm_kernel<2, End>, kSumThreads);
    }
  };
  using T = __nv_bfloat16;
  take(all_reduce_kernel<float>, kSumThreads);
  take(all_reduce_kernel<T>, kSumThreads);
  take_ending.template operator()<float, RowsInPlace<float>>();
  take_ending.template operator()<T, RowsInPlace<T>>();
  take_ending.template operator()<T, RowsOfGroups>();
  take_ending.template operator()<T, RowsOfTokens<WeightFormat::e4m3>>();
  take_ending.template operator()<T, RowsOfTokens<WeightFormat::int8>>();
  take(all_gather_kernel, kSumThreads);
  check(blocks > 0, ErrorKind::device, "{} cannot run the kernels that exchange sums",
        backend_.name());
  return blocks;
}

SentSums PeerCommunicator::sent_sums(int64_t n) const {
  SentSums sums = sent_sums_;
  sums.parts.columns = static_cast<int>(n);
  sums.parts.share = static_cast<int>(n / table_.world);
  return sums;
}

bool PeerCommunicator::gemm_for_sum(Tensor y, Tensor x, Weight w) {
  constexpr int64_t kWidestTile = 256;
  const int64_t rows = y.shape[0], n = y.shape[1], row_bytes = n * 2;
  if (!alike_ || y.dtype != DType::bf16 || !y.contiguous() ||
      rows > std::min(kMostSentRows, table_.most_blocks) || n % (kWidestTile * table_.world) != 0 ||
      row_bytes > kSentRowBytes)
    return false;
  if (!backend_.gemm_sent(y, x, w, sent_sums(n).parts)) return false;
  sent_ = y.data;
  return true;
}

void PeerCommunicator::sum_sent(Tensor x, Tensor residual, Tensor w, float eps,
                                const Weight& reader) {
  check(sent_ == x.data && holds_rows(x, residual, w), "the sum of another product than was sent");
  sent_ = nullptr;
  const int64_t rows = x.shape[0], n = x.shape[1];
  const unsigned threads = row_threads(n);
  sum_for(reader, x, [&]<class End>(const End& end) {
    if constexpr (!std::is_same_v<End, RowsInPlace<float>>)
      launch_with(sent_sums(n),
                  n * 2 <= int64_t{threads} * 16 ? sum_sent_norm_kernel<1, End>
                                                 : sum_sent_norm_kernel<2, End>,
                  static_cast<unsigned>(rows), threads, true, end, device_ptr<bf16>(residual),
                  device_ptr<bf16>(w), eps, sent_sums_.parts.round + 1);
  });
}

template <class Table, class... Parameters, class... Arguments>
void PeerCommunicator::launch_with(const Table& table, void (*kernel)(Parameters...),
                                   unsigned blocks, unsigned threads, bool early,
                                   Arguments&&... arguments) {
  backend_.await_gemm_families();
  cuda_check(cudaSetDevice(backend_.device().index));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = stream_;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = early && backend_.can_launch_early() ? 1 : 0;
  cuda_check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)..., table));
  await_launches();
}

void PeerCommunicator::await_launches() {
  cudaStreamCaptureStatus status{};
  cuda_check(cudaStreamIsCapturing(stream_, &status));
  if (status == cudaStreamCaptureStatusNone) meeting_.barrier(table_.rank);
}

void PeerCommunicator::all_reduce(Tensor x) {
  const auto bytes = static_cast<int64_t>(x.bytes());
  check_whole_vectors(x);
  if (bytes == 0) return;
  const unsigned blocks = blocks_for(bytes);
  dispatch_float(x.dtype, [&]<class T>() {
    using D = DeviceType<T>;
    launch(all_reduce_kernel<D>, blocks, kSumThreads, false, reinterpret_cast<Vec<D>*>(x.data),
           bytes / 16, shares_sums(bytes));
  });
}

bool PeerCommunicator::all_reduce_add_rms_norm(Tensor x, Tensor residual, Tensor w, float eps,
                                               Weight reader) {
  if (sent_) return sum_sent(x, residual, w, eps, reader), true;
  const int64_t rows = x.shape[0], n = x.shape[1], row_bytes = n * int64_t(size_of(x.dtype));
  const unsigned threads = row_threads(n);
  if (!holds_rows(x, residual, w) || 16 * WarpVectors::words(row_bytes / 16) > kPlaceBytes)
    return false;
  // Whether a row has something to sum for each rank.
  const bool shares =
      shares_sums(rows * row_bytes) && row_bytes / 16 > (table_.world - 1) * int64_t{kWarp};
  const int64_t to_all = rows * row_bytes * (table_.world - 1);
  if ((shares ? 2 * to_all / table_.world : to_all) > kFusedBytes) return false;
  if (rows == 0) return true;
  sum_for(reader, x, [&]<class End>(const End& end) {
    using T = std::conditional_t<std::is_same_v<End, RowsInPlace<float>>, float, bf16>;
    using D = DeviceType<T>;
    const bool one_each = row_bytes <= int64_t{threads} * 16;
    const auto kernel = shares     ? one_each ? all_reduce_norm_kernel<D, 1, true, End>
                                              : all_reduce_norm_kernel<D, 2, true, End>
                            : one_each ? all_reduce_norm_kernel<D, 1, false, End>
                                   : all_reduce_norm_kernel<D, 2, false, End>;
    launch(kernel, static_cast<unsigned>(std::min<int64_t>(rows, table_.most_blocks)), threads,
           true, end, device_ptr<T>(x), device_ptr<T>(residual), device_ptr<T>(w), rows, n, eps);
  });
  return true;
}

void PeerCommunicator::all_gather(Tensor out, Tensor parts) {
  const Tensor own = parts[table_.rank];
  const int64_t t = own.shape[0], n = own.shape[1], m = out.shape[1];
  check(out.dtype == DType::f32 && parts.dtype == DType::f32 && out.contiguous() &&
            parts.contiguous() && out.shape[0] == t,
        "all_gather of {} to {}", parts.describe(), out.describe());
  if (t * n == 0) return;
  const bool wide = n % 4 == 0 && m % 4 == 0 && wide_rows({out, own});
  launch(all_gather_kernel, blocks_for(t * n * int64_t{sizeof(float)}), kSumThreads, false,
         out.ptr<float>(), own.ptr<float>(), t * n, n, m, wide);
}

}  // namespace

bool all_reach_each_other(const CudaBackend& backend, RankMeeting& meeting, int rank) {
  const int own = backend.device().index;
  bool reaches = true;
  for (const int other : from_all(own, meeting, rank)) {
    int can = 1;
    if (other != own) cuda_check(cudaDeviceCanAccessPeer(&can, own, other));
    reaches = reaches && can != 0;
  }
  meeting.show(rank, &reaches);
  meeting.barrier(rank);
  bool all = true;
  for (int r = 0; r < meeting.world_size(); ++r)
    all = all && *static_cast<bool*>(meeting.shown_by(r));
  meeting.barrier(rank);
  return all;
}

std::unique_ptr<Communicator> make_peer_communicator(CudaBackend& backend, RankMeeting& meeting,
                                                     int rank) {
  return std::make_unique<PeerCommunicator>(backend, meeting, rank);
}

}  // namespace nanovllm
