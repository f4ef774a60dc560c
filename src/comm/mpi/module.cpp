// libnanovllm-mpi.so: ProcessGroup over MPI.
//
// Collectives are MPI's non-blocking ones, so that no rank waits for good: each is started, and
// looked after until it is done or a peer has been missing for too long.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include <mpi.h>

#include "comm/process_group.h"
#include "comm/stopped_ranks.h"
#include "comm/sum.h"
#include "core/load_module.h"

namespace nanovllm {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kPatience{8};

void mpi_check(int status) {
  if (status == MPI_SUCCESS) [[likely]]
    return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(status, text, &length);
  fail(ErrorKind::engine, "MPI: {}", text);
}

int count_of(size_t bytes) {
  check(bytes <= static_cast<size_t>(std::numeric_limits<int>::max()),
        "an MPI message of {} bytes is too large", bytes);
  return static_cast<int>(bytes);
}

/// Waits, first busily, later with sleep. `later`, if any, is called again and again from an
/// instant on.
void finish(MPI_Request request, const std::function<void(Clock::duration)>& later) {
  const auto begin = Clock::now();
  for (int looks = 0;; ++looks) {
    int done = 0;
    mpi_check(MPI_Test(&request, &done, MPI_STATUS_IGNORE));
    if (done) return;
    if (looks < 10'000) continue;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    if (later) later(Clock::now() - begin);
  }
}

/// The same for an operation, `what`, that must end in time.
void finish(MPI_Request request, const char* what, int rank) {
  finish(request, [&](Clock::duration waited) {
    if (waited > kPatience + lateness(rank))
      fail(ErrorKind::engine, "rank {} has waited {} s for another rank in {}: {}", rank,
           kPatience.count(), what, describe_missing_ranks());
  });
}

class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(int rank, int world_size) : rank_(rank), world_size_(world_size) {}
  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }

  // Every rank gets its share of the elements from all, sums it, and gives the sum to all.
  void all_reduce(Tensor x) override {
    check(x.contiguous(), "all_reduce of strided {}", x);
    dispatch_float(x.dtype, [&]<class T>() {
      const int64_t n = x.numel(), share = (n + world_size_ - 1) / world_size_;
      if (n == 0) return;
      const auto bytes = static_cast<size_t>(share) * sizeof(T);
      send_.assign(bytes * static_cast<size_t>(world_size_), std::byte{});
      received_.resize(send_.size());
      std::memcpy(send_.data(), x.data, x.bytes());
      MPI_Request request = MPI_REQUEST_NULL;
      mpi_check(MPI_Ialltoall(send_.data(), count_of(bytes), MPI_BYTE, received_.data(),
                              count_of(bytes), MPI_BYTE, MPI_COMM_WORLD, &request));
      finish(request, "all_reduce", rank_);
      std::vector<T*> ranks;
      for (int r = 0; r < world_size_; ++r)
        ranks.push_back(reinterpret_cast<T*>(received_.data()) + r * share);
      sum_ranks<T>(ranks[0], ranks, 0, share);
      mpi_check(MPI_Iallgather(ranks[0], count_of(bytes), MPI_BYTE, send_.data(), count_of(bytes),
                               MPI_BYTE, MPI_COMM_WORLD, &request));
      finish(request, "all_reduce", rank_);
      std::memcpy(x.data, send_.data(), x.bytes());
    });
  }

  void all_gather(Tensor out, Tensor parts) override {
    const Tensor own = parts[rank_];
    const int64_t t = own.shape[0], n = own.shape[1], m = out.shape[1];
    check(out.contiguous() && parts.contiguous() && out.dtype == parts.dtype && out.shape[0] == t,
          "all_gather of {} to {}", parts, out);
    MPI_Request request = MPI_REQUEST_NULL;
    mpi_check(MPI_Iallgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, parts.data, count_of(own.bytes()),
                             MPI_BYTE, MPI_COMM_WORLD, &request));
    finish(request, "all_gather", rank_);
    const auto size = static_cast<int64_t>(size_of(out.dtype));
    for (int r = 0; r < world_size_; ++r) {
      const int64_t width = std::clamp<int64_t>(m - r * n, 0, n) * size;
      for (int64_t row = 0; row < t && width > 0; ++row)
        std::memcpy(out.data + (row * m + r * n) * size, parts[r].data + row * n * size,
                    static_cast<size_t>(width));
    }
  }

 private:
  int rank_, world_size_;
  std::vector<std::byte> send_, received_;
};

class MpiGroup final : public ProcessGroup {
 public:
  MpiGroup() {
    int provided = 0, done = 0;
    mpi_check(MPI_Initialized(&done));
    if (!done) mpi_check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided));
    mpi_check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
    mpi_check(MPI_Comm_rank(MPI_COMM_WORLD, &rank_));
    mpi_check(MPI_Comm_size(MPI_COMM_WORLD, &world_size_));
    MPI_Comm host = MPI_COMM_NULL;
    mpi_check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host));
    mpi_check(MPI_Comm_size(host, &ranks_on_host_));
    mpi_check(MPI_Comm_rank(host, &rank_on_host_));
    mpi_check(MPI_Comm_free(&host));
  }
  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  int ranks_on_host() const override { return ranks_on_host_; }
  int rank_on_host() const override { return rank_on_host_; }
  std::unique_ptr<Communicator> make_communicator() override {
    return std::make_unique<MpiCommunicator>(rank_, world_size_);
  }
  void broadcast(std::span<std::byte> bytes) override {
    finish(start_broadcast(bytes), "a step's plan", rank_);
  }
  void await_broadcast(std::span<std::byte> bytes,
                       const std::function<void()>& meanwhile) override {
    constexpr std::chrono::milliseconds kInstant{50};
    bool called = !meanwhile;
    finish(start_broadcast(bytes), [&](Clock::duration waited) {
      if (called || waited < kInstant) return;
      called = true;
      meanwhile();
    });
  }
  void leave() override { mpi_check(MPI_Finalize()); }
  int64_t smallest(int64_t value) override {
    int64_t result = value;
    mpi_check(MPI_Allreduce(&value, &result, 1, MPI_INT64_T, MPI_MIN, MPI_COMM_WORLD));
    return result;
  }

 private:
  static MPI_Request start_broadcast(std::span<std::byte> bytes) {
    MPI_Request request = MPI_REQUEST_NULL;
    mpi_check(
        MPI_Ibcast(bytes.data(), count_of(bytes.size()), MPI_BYTE, 0, MPI_COMM_WORLD, &request));
    return request;
  }

  int rank_ = 0, world_size_ = 1, ranks_on_host_ = 1, rank_on_host_ = 0;
};

}  // namespace
}  // namespace nanovllm

extern "C" __attribute__((visibility("default"))) nanovllm::ProcessGroup* nanovllm_open_mpi(
    const char* version, char* error, size_t error_size) {
  return nanovllm::made_by_module(nanovllm::kMpiModuleFile, version, error, error_size,
                                  [] { return std::make_unique<nanovllm::MpiGroup>(); });
}

static_assert(std::is_same_v<decltype(nanovllm_open_mpi), nanovllm::OpenMpiFunction>);
