// Ranks on GPUs: the collectives against sums on the host, bit for bit, and whole engines against
// one rank. Ranks need a GPU each: on a shared one the driver may wait for one rank's kernel while
// it serves another's. Gathering alone is simple enough to share.
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>
#include <thread>

#include <gtest/gtest.h>

#include "engine/llm_engine.h"
#include "engine/open_ranks.h"
#include "engine/rank_group.h"
#include "io/checkpoint.h"

namespace nanovllm {
namespace {

using namespace std::chrono_literals;

/// The GPUs of `world` ranks: of their own if there are as many. Empty where there is none, or
/// where a GPU would have to hold the waiting blocks of more than three ranks at once.
std::vector<std::string> devices_for(int world, bool may_share) {
  ::setenv("CUDA_MODULE_LOADING", "EAGER", 0);  // not while another rank's kernel waits for ours
  int count = 0;
  for (; count < world; ++count) {
    try {
      make_backend(fmt::format("cuda:{}", count), {});
    } catch (const Error&) {
      break;
    }
  }
  std::vector<std::string> devices;
  if (world > (may_share ? 3 : 1) * count) return devices;
  for (int r = 0; r < world; ++r) devices.push_back(fmt::format("cuda:{}", r % count));
  return devices;
}

void on_ranks(const std::vector<std::string>& devices,
              const std::function<void(Backend&, Communicator&, ThreadGroup&)>& body) {
  const auto group = std::make_shared<ThreadGroup>(static_cast<int>(devices.size()), 20s);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < group->world_size(); ++rank)
    threads.emplace_back([&, rank] {
      try {
        const auto backend = make_backend(devices[static_cast<size_t>(rank)], {});
        const auto comm = open_communicator(*backend, group, rank);
        body(*backend, *comm, *group);
        backend->synchronize();
        group->barrier(rank);  // nobody frees what another still writes to
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
        group->fail({rank, ErrorKind::engine, error.what()});
      }
    });
  for (std::thread& thread : threads) thread.join();
}

template <class T>
std::vector<T> values_of(int rank, int64_t count) {
  std::mt19937 random(static_cast<uint32_t>(rank + 1));
  std::uniform_real_distribution<float> uniform(-8, 8);
  std::vector<T> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(static_cast<T>(uniform(random)));
  return values;
}

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
void expect_sums(const std::vector<std::string>& devices, int64_t count) {
  const auto world = static_cast<int>(devices.size());
  const auto expected = sum_of<T>(world, count);
  on_ranks(devices, [&](Backend& backend, Communicator& comm, ThreadGroup& group) {
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

TEST(CudaParallel, AllReduceSumsInRankOrderWhateverTheSize) {
  if (devices_for(2, false).empty()) GTEST_SKIP() << "no two cuda devices here";
  for (const int world : {2, 3, 4, 8}) {
    const auto devices = devices_for(world, false);
    if (devices.empty()) break;
    // Parts of a block, whole ones, several rounds; beyond 256 KB and two ranks, two-shot.
    for (const int64_t count : {8, 4096, 4104, 100000, 131080, 1 << 20, (1 << 22) + 8}) {
      expect_sums<bf16>(devices, count);
      if (count <= (1 << 20)) expect_sums<float>(devices, count);
    }
  }
}

TEST(CudaParallel, GathersColumnsAndLeavesOutThePadding) {
  if (devices_for(1, true).empty()) GTEST_SKIP() << "no cuda device here";
  for (const int world : {2, 3, 8}) {
    const auto devices = devices_for(world, true);
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

/// Greedy tokens of a golden model on `runner`.
std::vector<std::vector<int32_t>> answers(std::unique_ptr<Runner> runner, const ModelConfig& model,
                                          const EngineConfig& config) {
  LLMEngine engine(std::move(runner), model, config, nullptr, {});
  SamplingParams params{.temperature = 0, .max_tokens = 40};
  for (int32_t length : {1, 5, 70, 130}) {
    std::vector<int32_t> prompt;
    for (int32_t i = 0; i < length; ++i) prompt.push_back((7 * i + length) % 200);
    engine.add_request(std::move(prompt), params);
  }
  std::vector<std::vector<int32_t>> tokens(4);
  while (!engine.is_finished())
    for (const RequestOutput& output : engine.step())
      if (output.finished) tokens[static_cast<size_t>(output.request_id)] = output.token_ids;
  return tokens;
}

TEST(CudaParallel, EnginesOfSeveralRanksAnswerLikeOne) {
  if (devices_for(2, false).empty()) GTEST_SKIP() << "no two cuda devices here";
  const std::string directory =
      std::string(NANOVLLM_SOURCE_DIR) + "/tests/data/goldens/llama-parallel-biases";
  const ModelConfig model = load_model_config(directory, std::vector<std::string_view>{});
  const auto checkpoint = std::make_shared<const Checkpoint>(directory);
  EngineConfig config;
  config.dtype = "f32";
  config.num_gpu_blocks_override = 64;
  for (const bool eager : {true, false}) {
    config.enforce_eager = eager;
    for (const int world : {2, 4, 8}) {
      const auto devices = devices_for(world, false);
      if (devices.empty()) break;
      auto one = std::make_unique<ModelRunner>(
          make_backend(devices[0], {}), std::make_unique<SingleCommunicator>(), model, config);
      one->load(checkpoint.get(), 0, {});
      const auto expected = answers(std::move(one), model, config);
      for (int again = 0; again < 2; ++again) {
        auto many = std::make_unique<RankGroup>(
            world, [&](int rank) { return make_backend(devices[static_cast<size_t>(rank)], {}); },
            model, config);
        many->load(checkpoint, 0, {});
        EXPECT_EQ(answers(std::move(many), model, config), expected) << world << " ranks";
      }
    }
  }
}

}  // namespace
}  // namespace nanovllm
