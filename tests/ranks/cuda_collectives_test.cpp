// The collectives of ranks on GPUs against sums on the host, bit for bit. Ranks need a GPU each: on
// a shared one the driver may wait for one rank's kernel while it serves another's.
#include <cmath>
#include <cstring>
#include <random>

#include "gpu/rig.h"
#include "ranks/gpu_ranks.h"

namespace nanovllm {
namespace {

template <class T>
std::vector<T> sum_of(int world, int64_t count) {
  std::vector<float> sum(static_cast<size_t>(count));
  for (int r = 0; r < world; ++r) {
    const auto values = values_of<T>(r, count);
    for (size_t i = 0; i < sum.size(); ++i)
      sum[i] = r == 0 ? static_cast<float>(values[i]) : sum[i] + static_cast<float>(values[i]);
  }
  std::vector<T> rounded;
  for (const float value : sum) rounded.push_back(static_cast<T>(value));
  return rounded;
}

/// Several times over, so that the halves of the exchange memory take turns; once as a graph.
template <class T>
void expect_sums(const std::vector<std::string>& devices, int64_t count,
                 const std::vector<CudaLimits>& limits = {}) {
  const auto world = static_cast<int>(devices.size());
  const auto expected = sum_of<T>(world, count);
  on_ranks(devices, limits, [&](Backend& backend, Communicator& comm, ThreadGroup& group) {
    auto values = values_of<T>(comm.rank(), count);
    const Buffer memory = backend.allocate(values.size() * sizeof(T) + 256);
    const Tensor x(memory.get(), dtype_of<T>(), {1, count}, backend.device());
    backend.synchronize();
    group.barrier(comm.rank());  // memory comes and goes while no kernel waits
    const auto check_one = [&](const std::function<void()>& reduce) {
      backend.copy(x, Tensor(values.data(), dtype_of<T>(), {1, count}));
      reduce();
      std::vector<T> got(values.size());
      backend.copy(Tensor(got.data(), dtype_of<T>(), {1, count}), x);
      backend.synchronize();
      EXPECT_EQ(std::memcmp(got.data(), expected.data(), got.size() * sizeof(T)), 0)
          << count << " values, rank " << comm.rank() << " of " << world;
    };
    for (int again = 0; again < 5; ++again) check_one([&] { comm.all_reduce(x); });
    const auto graph = backend.capture([&] { comm.all_reduce(x); });
    for (int again = 0; again < 3; ++again) check_one([&] { graph->launch(); });
    check_one([&] { comm.all_reduce(x); });
  });
}

TEST(CudaCollectives, AllReduceSumsInRankOrderWhateverTheSize) {
  if (devices_for(2).empty()) GTEST_SKIP() << "no two cuda devices here";
  for (const int world : {2, 3, 4, 8}) {
    const auto devices = devices_for(world);
    if (devices.empty()) break;
    // Parts of a block, whole ones, several rounds; beyond two ranks in two ways (WarpSum).
    for (const int64_t count : {8, 4096, 4104, 100000, 131080, 1 << 20, (1 << 22) + 8}) {
      expect_sums<bf16>(devices, count);
      if (count <= (1 << 20)) expect_sums<float>(devices, count);
    }
  }
}

/// Two sums with their norms under way at once, of one and of several rounds through the scratch
/// memory: the whole stream, or this rank's share of its rows.
template <class T>
void expect_sums_beside(const std::vector<std::string>& devices, int64_t rows, int64_t n,
                        bool whole) {
  const auto world = static_cast<int>(devices.size());
  const auto sum = sum_of<T>(world, rows * n);
  on_ranks(devices, [&](Backend& backend, Communicator& comm, ThreadGroup& group) {
    auto values = values_of<T>(comm.rank(), rows * n), stream = values_of<T>(99, rows * n),
         weights = values_of<T>(98, n);
    const size_t bytes = (values.size() * sizeof(T) + 255) / 256 * 256;
    const Buffer memory = backend.allocate(7 * bytes);
    backend.synchronize();
    group.barrier(comm.rank());
    const auto at = [&](int i, std::initializer_list<int64_t> shape) {
      return Tensor(memory.get() + static_cast<size_t>(i) * bytes, dtype_of<T>(), shape,
                    backend.device());
    };
    const auto host = [&](const std::vector<T>& v, std::initializer_list<int64_t> shape) {
      return Tensor(const_cast<T*>(v.data()), dtype_of<T>(), shape);
    };
    const auto x = [&](int half) { return at(half, {rows, n}); };
    const auto residual = [&](int half) { return at(2 + half, {rows, n}); };
    const Tensor y = at(4, {rows, n}), y_residual = at(5, {rows, n}), w = at(6, {n});
    backend.copy(w, host(weights, {n}));
    backend.copy(y, host(sum, {rows, n}));
    backend.copy(y_residual, host(stream, {rows, n}));
    backend.add_rms_norm(y, y_residual, y, w, 1e-5F);
    const auto expect_rows = [&](const Tensor& got, const Tensor& expected, const char* what) {
      std::vector<T> one(static_cast<size_t>(got.numel())), two(one.size());
      const Tensor shape(one.data(), dtype_of<T>(), {got.shape[0], n});
      backend.copy(shape, got);
      backend.copy(Tensor(two.data(), dtype_of<T>(), {got.shape[0], n}), expected);
      backend.synchronize();
      EXPECT_EQ(std::memcmp(one.data(), two.data(), one.size() * sizeof(T)), 0)
          << what << " of " << rows << " x " << n << ", rank " << comm.rank() << " of " << world;
    };
    const int64_t begin = whole ? 0 : rows * comm.rank() / world,
                  end = whole ? rows : rows * (comm.rank() + 1) / world;
    for (int again = 0; again < 3; ++again) {
      for (const int half : {0, 1}) {
        backend.copy(x(half), host(values, {rows, n}));
        backend.copy(residual(half), host(stream, {rows, n}));
      }
      for (const int half : {0, 1})
        EXPECT_TRUE(
            comm.fusions().start_add_rms_norm(half, x(half), residual(half), w, 1e-5F, whole));
      for (const int half : {0, 1}) {
        comm.fusions().finish_half(half);
        expect_rows(x(half), y, "norm");
        if (begin < end)
          expect_rows(residual(half).rows(begin, end), y_residual.rows(begin, end), "stream");
      }
      group.barrier(comm.rank());  // nobody fills what another still writes to
    }
  });
}

// Here no kernel waits for another: ranks may share a GPU.
TEST(CudaCollectives, SumsBesideProductsAreThoseOfAllReduceWithTheNorm) {
  if (devices_for(1).empty()) GTEST_SKIP() << "no cuda device here";
  const bool has_two = !devices_for(2).empty();
  for (const int world : {2, 3, 4, 8}) {
    std::vector<std::string> devices;
    for (int rank = 0; rank < world; ++rank)
      devices.push_back(has_two && rank % 2 == 1 ? "cuda:1" : "cuda:0");
    for (const int64_t n : {64, 8192}) {
      expect_sums_beside<bf16>(devices, 1, n, true);
      expect_sums_beside<bf16>(devices, 7, n, false);
      expect_sums_beside<bf16>(devices, 200, n, n == 64);
    }
    expect_sums_beside<float>(devices, 70, 1024, false);
    // More than what goes through the scratch memory (48 MB for the others' parts) at once.
    if (world == 2) expect_sums_beside<bf16>(devices, 6200, 8192, true);
  }
}

/// The fused operation against the two that define it, several times over and in a graph.
template <class T>
void expect_reduced_and_normalised(const std::vector<std::string>& devices, int64_t rows, int64_t n,
                                   const std::vector<CudaLimits>& limits = {}) {
  on_ranks(devices, limits, [&](Backend& backend, Communicator& comm, ThreadGroup& group) {
    const auto values = values_of<T>(comm.rank(), rows * n), stream = values_of<T>(99, rows * n),
               weights = values_of<T>(98, n);
    const auto host = [&](const std::vector<T>& v, std::initializer_list<int64_t> shape) {
      return Tensor(const_cast<T*>(v.data()), dtype_of<T>(), shape);
    };
    const size_t bytes = (values.size() * sizeof(T) + 255) / 256 * 256;
    const Buffer memory = backend.allocate(5 * bytes);
    const auto at = [&](int64_t i, std::initializer_list<int64_t> shape) {
      return Tensor(memory.get() + static_cast<size_t>(i) * bytes, dtype_of<T>(), shape,
                    backend.device());
    };
    const Tensor x = at(0, {rows, n}), residual = at(1, {rows, n}), w = at(2, {n}),
                 x_two = at(3, {rows, n}), residual_two = at(4, {rows, n});
    backend.synchronize();
    group.barrier(comm.rank());
    const auto fill = [&] {
      backend.copy(w, host(weights, {n}));
      for (const Tensor& t : {x, x_two}) backend.copy(t, host(values, {rows, n}));
      for (const Tensor& t : {residual, residual_two}) backend.copy(t, host(stream, {rows, n}));
    };
    std::vector<T> got(values.size()), expected(values.size());
    const auto check_one = [&](const std::function<void()>& fused) {
      fill();
      fused();
      comm.all_reduce(x_two);
      backend.add_rms_norm(x_two, residual_two, x_two, w, 1e-5F);
      for (const auto& [one, two] : {std::pair(x, x_two), std::pair(residual, residual_two)}) {
        backend.copy(host(got, {rows, n}), one);
        backend.copy(host(expected, {rows, n}), two);
        backend.synchronize();
        EXPECT_EQ(std::memcmp(got.data(), expected.data(), got.size() * sizeof(T)), 0)
            << rows << " x " << n << ", rank " << comm.rank() << " of " << comm.world_size();
      }
    };
    const auto fused = [&] {
      EXPECT_TRUE(comm.fusions().all_reduce_add_rms_norm(x, residual, w, 1e-5F))
          << rows << " x " << n;
    };
    for (int again = 0; again < 3; ++again) check_one(fused);
    const auto graph = backend.capture(fused);
    for (int again = 0; again < 3; ++again) check_one([&] { graph->launch(); });
  });
}

TEST(CudaCollectives, AllReduceWithTheNormIsTheTwoOneAfterTheOther) {
  if (devices_for(2).empty()) GTEST_SKIP() << "no two cuda devices here";
  for (const int world : {2, 4, 8}) {
    const auto devices = devices_for(world);
    if (devices.empty()) break;
    // One warp to sixteen, two vectors a thread; summed by all ranks, then by one for all, where
    // there are more than two and a row has a warp for each; several rows a block.
    for (const int64_t n : {64, 1024, 4096, 5120, 8192})
      for (const int64_t rows : {1, 7, 64, 65, 256, 700}) {
        const int64_t bytes = rows * n * 2, most = world == 2 ? 4 << 20
                                                   : n >= 256 * world
                                                       ? (4 << 20) * world / (2 * (world - 1))
                                                       : (4 << 20) / (world - 1);
        if (bytes > most) continue;
        expect_reduced_and_normalised<bf16>(devices, rows, n);
      }
    expect_reduced_and_normalised<float>(devices, 3, 1024);
    expect_reduced_and_normalised<float>(devices, 65, 256);
  }
}

// A choice that a rank would make by its GPU alone, others must make, too: here no kernel waits for
// another, so that ranks may share a GPU.
TEST(CudaCollectives, RanksOfUnlikeGpusAgreeOnWhatAllOfThemDo) {
  if (devices_for(1).empty()) GTEST_SKIP() << "no cuda device here";
  const std::vector<std::string> devices{"cuda:0", "cuda:0"};
  for (const int sms : {0, 40})
    on_ranks(devices, {{}, {.num_sms = sms}},
             [&](Backend& backend, Communicator& comm, ThreadGroup&) {
               const bool alike = sms == 0;
               EXPECT_EQ(comm.fusions().sums_in_decoder_layers(), alike) << "rank " << comm.rank();
               if (alike) return;
               constexpr int64_t kRows = 128, kSide = 2048;
               Rig rig(backend);
               EXPECT_FALSE(comm.fusions().gemm_for_sum(
                   rig.empty(DType::bf16, {kRows, kSide}), rig.empty(DType::bf16, {kRows, kSide}),
                   rig.weight(normal_values(kSide * kSide, 1), DType::bf16, kSide, kSide)))
                   << "rank " << comm.rank();
             });
}

// Blocks wait for the other ranks', so no launch may have more than each GPU runs at once.
TEST(CudaCollectives, SumsOfGpusWithFewSmsAreThoseOfOthers) {
  const auto devices = devices_for(2);
  if (devices.empty()) GTEST_SKIP() << "no two cuda devices here";
  const std::vector<CudaLimits> limits{{.num_sms = 7}, {.num_sms = 30}};
  for (const int64_t count : {64, 4104, 131080, (1 << 20) + 8})
    expect_sums<bf16>(devices, count, limits);
  for (const int64_t rows : {1, 65, 200})
    expect_reduced_and_normalised<bf16>(devices, rows, 4096, limits);
}

// Words are wiped every 2^20 rounds.
TEST(CudaCollectives, RoundsMayBeAnyNumber) {
  const auto devices = devices_for(2);
  if (devices.empty()) GTEST_SKIP() << "no two cuda devices here";
  constexpr int kCalls = 1024, kLaunches = 1030;
  on_ranks(devices, [&](Backend& backend, Communicator& comm, ThreadGroup& group) {
    constexpr int64_t kSize = 64;
    const std::vector<float> ones(kSize, 1.0F);
    const Buffer memory = backend.allocate(3 * kSize * sizeof(float));
    const auto at = [&](int64_t i) {
      return Tensor(memory.get() + i * kSize * 4, DType::f32, {1, kSize}, backend.device());
    };
    const Tensor x = at(0), residual = at(1), w = at(2);
    for (const Tensor& t : {x, residual, w})
      backend.copy(t, Tensor(const_cast<float*>(ones.data()), DType::f32, {1, kSize}));
    backend.synchronize();
    group.barrier(comm.rank());
    const auto graph = backend.capture([&] {
      for (int i = 0; i < kCalls; ++i)
        comm.fusions().all_reduce_add_rms_norm(x, residual, w.reshape({kSize}), 0);
    });
    for (int i = 0; i < kLaunches; ++i) graph->launch();
    std::vector<float> got(kSize);
    backend.copy(Tensor(got.data(), DType::f32, {1, kSize}), residual);
    backend.synchronize();
    // x is about 1 after every norm, and each call adds it twice.
    for (const float value : got)
      EXPECT_NEAR(value, 2.0F * kCalls * kLaunches, 1e-3F * kCalls * kLaunches);
  });
}

TEST(CudaCollectives, GathersColumnsAndLeavesOutThePadding) {
  if (devices_for(2).empty()) GTEST_SKIP() << "no two cuda devices here";
  for (const int world : {2, 3, 8}) {
    const auto devices = devices_for(world);
    if (devices.empty()) break;
    for (const auto& [t, n] : {std::pair<int64_t, int64_t>{1, 7}, {3, 1001}, {64, 20011}}) {
      const int64_t m = world * n - 3;
      on_ranks(
          devices, [&, t = t, n = n](Backend& backend, Communicator& comm, ThreadGroup& group) {
            const auto number = [&](int64_t row, int64_t column) {
              return static_cast<float>(row * 1000003 % 65537 + column);
            };
            std::vector<float> own(static_cast<size_t>(t * n)), got(static_cast<size_t>(t * m));
            for (int64_t row = 0; row < t; ++row)
              for (int64_t column = 0; column < n; ++column)
                own[static_cast<size_t>(row * n + column)] = number(row, comm.rank() * n + column);
            const Buffer parts = backend.allocate(own.size() * sizeof(float) *
                                                  static_cast<size_t>(comm.world_size())),
                         out = backend.allocate(got.size() * sizeof(float));
            const Tensor all(parts.get(), DType::f32, {comm.world_size(), t, n}, backend.device());
            backend.synchronize();
            group.barrier(comm.rank());
            for (int again = 0; again < 3; ++again) {
              backend.synchronize();  // a copy from pageable memory waits for it in the driver
              group.barrier(comm.rank());
              backend.copy(all[comm.rank()], Tensor(own.data(), DType::f32, {t, n}));
              comm.all_gather(Tensor(out.get(), DType::f32, {t, m}, backend.device()), all);
            }
            backend.copy(Tensor(got.data(), DType::f32, {t, m}),
                         Tensor(out.get(), DType::f32, {t, m}, backend.device()));
            backend.synchronize();
            int64_t wrong = 0;
            for (int64_t row = 0; row < t; ++row)
              for (int64_t column = 0; column < m; ++column)
                wrong += got[static_cast<size_t>(row * m + column)] != number(row, column);
            EXPECT_EQ(wrong, 0) << t << " x " << n << ", rank " << comm.rank();
          });
    }
  }
}

/// Tokens that ranks sample from their parts of the logits, against those from all of them: with
/// and without noise, with ties between parts, and with rows that are not finite.
void expect_sampled(const std::vector<std::string>& devices, int64_t rows, int64_t vocab) {
  const auto world = static_cast<int64_t>(devices.size()), n = (vocab + world - 1) / world;
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> logits(static_cast<size_t>(rows * vocab)), temperature;
  std::vector<int64_t> seeds;
  std::vector<int32_t> positions;
  for (float& logit : logits) logit = normal(random);
  for (int64_t row = 0; row < rows; ++row) {
    float* own = logits.data() + row * vocab;
    temperature.push_back(row % 3 == 0 ? 0.0F : 0.6F * static_cast<float>(row % 3));
    seeds.push_back(row * 977 + 1);
    positions.push_back(static_cast<int32_t>(row) * 3);
    if (row % 5 == 1) own[1] = own[vocab - 1] = 50;
    if (row % 7 == 3) own[(row * 131) % vocab] = NAN;
  }
  on_ranks(devices, [&](Backend& backend, Communicator& comm, ThreadGroup& group) {
    const auto up = [&]<class T>(std::vector<T>& from, DType dtype, Buffer& memory,
                                 std::initializer_list<int64_t> shape) {
      memory = backend.allocate(from.size() * sizeof(T));
      const Tensor t(memory.get(), dtype, shape, backend.device());
      backend.copy(t, Tensor(from.data(), dtype, shape));
      return t;
    };
    std::vector<float> part(static_cast<size_t>(rows * n), NAN);  // padding may be anything
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t c = 0; c < n && comm.rank() * n + c < vocab; ++c)
        part[static_cast<size_t>(row * n + c)] =
            logits[static_cast<size_t>(row * vocab + comm.rank() * n + c)];
    Buffer buffers[7];
    auto all = logits;
    auto t = temperature;
    auto s = seeds;
    auto p = positions;
    std::vector<int32_t> zeros(static_cast<size_t>(2 * rows));
    const Tensor whole = up(all, DType::f32, buffers[0], {rows, vocab}),
                 own = up(part, DType::f32, buffers[1], {rows, n}),
                 ids = up(zeros, DType::i32, buffers[2], {2 * rows});
    SamplingBatch params;
    params.temperature = up(t, DType::f32, buffers[3], {rows});
    params.seed = up(s, DType::i64, buffers[4], {rows});
    params.position = up(p, DType::i32, buffers[5], {rows});
    backend.synchronize();
    group.barrier(comm.rank());
    for (int again = 0; again < 3; ++again) {
      params.features = again == 2 ? 0u : uint32_t{kSampleRandom};
      backend.sample(ids.rows(0, rows), whole, params);
      EXPECT_TRUE(comm.fusions().sample(ids.rows(rows, 2 * rows), own, vocab, params));
      std::vector<int32_t> got(static_cast<size_t>(2 * rows));
      backend.copy(Tensor(got.data(), DType::i32, {2 * rows}), ids);
      backend.synchronize();
      const std::vector<int32_t> expected(got.begin(), got.begin() + rows);
      EXPECT_EQ(std::vector<int32_t>(got.begin() + rows, got.end()), expected)
          << rows << " x " << vocab << ", rank " << comm.rank() << " of " << world;
    }
  });
}

TEST(CudaCollectives, SamplesFromPartsWhatItSamplesFromAll) {
  if (devices_for(2).empty()) GTEST_SKIP() << "no two cuda devices here";
  for (const int world : {2, 4, 8}) {
    const auto devices = devices_for(world);
    if (devices.empty()) break;
    expect_sampled(devices, 1, 151936);
    expect_sampled(devices, 70, 32 * world - 1);
    expect_sampled(devices, 512, 4096);
  }
}

}  // namespace
}  // namespace nanovllm
