#include "ops/staged_load.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <thread>

#include <gtest/gtest.h>

#include "io/safetensors/checkpoint.h"
#include "unit/io/tensor_file.h"
#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

/// A device that is memory. Two buffers in turn, filled with rubbish before each use.
class MemoryBuffer : public StagingBuffer {
 public:
  explicit MemoryBuffer(size_t bytes)
      : buffers_{std::string(bytes, 'x'), std::string(bytes, 'x')} {}
  std::byte* next_buffer() override {
    turn_ ^= 1;
    std::fill(buffers_[turn_].begin(), buffers_[turn_].end(), 'x');
    return reinterpret_cast<std::byte*>(buffers_[turn_].data());
  }
  void send(std::byte* target, size_t bytes) override {
    ASSERT_LE(bytes, buffers_[turn_].size());
    std::memcpy(target, buffers_[turn_].data(), bytes);
  }
  void finish() override {}

 private:
  std::string buffers_[2];
  size_t turn_ = 0;
};

StagedLoad crew(int threads, size_t buffer_bytes) {
  return {buffer_bytes, threads, [=] { return std::make_unique<MemoryBuffer>(buffer_bytes); }};
}

void read_memory(std::span<std::byte> to, const std::byte* from) {
  std::memcpy(to.data(), from, to.size());
}

/// Weights of every kind: stacked, a strided shard, other dtypes, tiny, empty.
struct Weights {
  std::vector<float> values;
  std::vector<bf16> half;
  std::vector<WeightSource> sources;
  std::vector<std::vector<float>> expected;
  std::vector<std::vector<std::byte>> storage;

  Weights() {
    for (int i = 0; i < 6000; ++i) values.push_back(static_cast<float>(i % 255));  // exact in bf16
    for (const float v : values) half.emplace_back(v);
    add(DType::bf16, {rows(DType::bf16, 0, 7, 33), rows(DType::bf16, 1000, 20, 33)});
    add(DType::bf16, {rows(DType::f32, 50, 40, 61)});
    add(DType::f32, {rows(DType::bf16, 3, 10, 10), rows(DType::f32, 5, 1, 10)});
    add(DType::bf16, {rows(DType::bf16, 0, 50, 60).cols(17, 40)});
    add(DType::f32, {rows(DType::f32, 9, 1, 1)});
    add(DType::bf16, {rows(DType::bf16, 0, 0, 5)});
  }
  Tensor rows(DType dtype, int64_t first, int64_t n, int64_t k) {
    return dtype == DType::f32 ? Tensor(values.data() + first, dtype, {n, k})
                               : Tensor(half.data() + first, dtype, {n, k});
  }
  void add(DType dtype, std::vector<Tensor> parts) {
    expected.emplace_back();
    int64_t n = 0;
    for (const Tensor& part : parts) {
      n += part.shape[0];
      for (int64_t r = 0; r < part.shape[0]; ++r)
        for (int64_t c = 0; c < part.shape[1]; ++c) {
          const std::byte* at =
              part.data + static_cast<size_t>(r * part.stride[0] + c) * size_of(part.dtype);
          expected.back().push_back(part.dtype == DType::f32
                                        ? *reinterpret_cast<const float*>(at)
                                        : static_cast<float>(*reinterpret_cast<const bf16*>(at)));
        }
    }
    storage.emplace_back(expected.back().size() * size_of(dtype) + 1);
    sources.push_back({Tensor(storage.back().data(), dtype, {n, parts[0].shape[1]}), parts});
  }
  void expect_loaded() const {
    for (size_t i = 0; i < sources.size(); ++i) {
      const Tensor& dst = sources[i].dst;
      std::vector<float> found;
      for (int64_t j = 0; j < dst.numel(); ++j)
        found.push_back(dst.dtype == DType::f32 ? dst.ptr<float>()[j]
                                                : static_cast<float>(dst.ptr<bf16>()[j]));
      EXPECT_EQ(found, expected[i]) << "weight " << i;
    }
  }
};

TEST(StagedLoad, EveryNumberOfThreadsAndBufferSizeGivesTheSameBytes) {
  for (const int threads : {1, 2, 3, 8, 100})
    for (const size_t bytes : {size_t{8}, size_t{100}, size_t{4096}, size_t{1} << 20}) {
      SCOPED_TRACE(testing::Message() << threads << " threads, buffers of " << bytes);
      Weights weights;
      std::vector<size_t> loaded;
      const auto caller = std::this_thread::get_id();
      load_staged(crew(threads, bytes), weights.sources, read_memory, [&](size_t i) {
        EXPECT_EQ(std::this_thread::get_id(), caller);
        loaded.push_back(i);
      });
      weights.expect_loaded();
      std::sort(loaded.begin(), loaded.end());
      EXPECT_EQ(loaded, (std::vector<size_t>{0, 1, 2, 3, 4, 5}));
    }
}

TEST(StagedLoad, OneWeightOnTheCallersThread) {
  Weights weights;
  MemoryBuffer staging(64);
  for (const WeightSource& weight : weights.sources) load_staged(staging, 64, weight, read_memory);
  weights.expect_loaded();
}

std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(StagedLoad, PartsThatDoNotFitAreRefused) {
  Weights weights;
  weights.sources[1].parts.pop_back();
  EXPECT_EQ(message_of([&] { load_staged(crew(2, 64), weights.sources, read_memory, {}); }),
            "load: 0 rows into bf16[40, 61]");
}

// Whoever fails, and wherever: one error comes out, every thread has ended, and no more is read.
TEST(StagedLoad, AFailingThreadReportsItsErrorOnce) {
  for (const int threads : {1, 4}) {
    Weights weights;
    std::atomic<int> reads{0};
    const auto fail_third = [&](std::span<std::byte> to, const std::byte* from) {
      const int number = ++reads;
      check(number != 3, ErrorKind::model, "read {} failed", number);
      read_memory(to, from);
    };
    EXPECT_EQ(message_of([&] {
                load_staged(crew(threads, 8), weights.sources, fail_third, [](size_t) {});
              }),
              "read 3 failed");
    EXPECT_LT(reads, 3 + 2 * threads + 1000 * (threads - 1));  // of some 4000

    StagedLoad how = crew(threads, 64);
    how.open_staging = []() -> std::unique_ptr<StagingBuffer> {
      fail(ErrorKind::device, "no room for a buffer");
    };
    EXPECT_EQ(message_of([&] { load_staged(how, weights.sources, read_memory, [](size_t) {}); }),
              "no room for a buffer");
    EXPECT_EQ(message_of([&] {
                load_staged(crew(threads, 64), weights.sources, read_memory,
                            [](size_t) { fail(ErrorKind::engine, "stop here"); });
              }),
              "stop here");
  }
}

TEST(StagedLoad, AFileThatWasCutGivesOneLineInsteadOfASignal) {
  TempDirectory directory;
  const auto path = directory.path() / "model.safetensors";
  write_tensors(path, {{"w", "F32", std::string(4 << 20, 'w'), {1024, 1024}}});
  const Checkpoint checkpoint(directory.path().string());
  const size_t size = std::filesystem::file_size(path);
  std::filesystem::resize_file(path, size / 2);
  std::vector<std::byte> storage(4 << 20);
  const std::vector<WeightSource> sources = {
      {Tensor(storage.data(), DType::f32, {1024, 1024}), {checkpoint.find("w")->view()}}};
  const auto read = [&](std::span<std::byte> to, const std::byte* from) {
    checkpoint.read(to, from);
  };
  EXPECT_EQ(
      message_of([&] { load_staged(crew(4, 64 << 10), sources, read, [](size_t) {}); }),
      fmt::format("{}: was {} bytes when it was opened and is {} now: do not change a model while "
                  "it is loaded",
                  path.string(), size, size / 2));
}

}  // namespace
}  // namespace nanovllm
