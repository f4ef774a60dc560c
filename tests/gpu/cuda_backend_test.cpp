// The GPU as a device: memory, loading, copies, graphs, and what it says when something is not
// there.
#include <filesystem>

#include <dlfcn.h>
#include <gtest/gtest.h>

#include "gpu/gpu_test.h"
#include "ops/cuda_module.h"

namespace nanovllm {
namespace {

class CudaBackendTest : public GpuTest {};

template <class Body>
std::string error_of(ErrorKind kind, Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

TEST_F(CudaBackendTest, NamesItself) {
  EXPECT_TRUE(gpu_->name().starts_with("cuda:0 ")) << gpu_->name();
  EXPECT_EQ(gpu_->device(), (Device{Device::cuda, 0}));
}

TEST_F(CudaBackendTest, AllocatesZeroedMemoryAndGivesItBack) {
  const size_t before = gpu_->memory().free, size = size_t{512} << 20;
  {
    Buffer buffer = gpu_->allocate(size);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.get()) % 256, 0u);
    EXPECT_LE(gpu_->memory().free + size, before + (size_t{8} << 20));
    std::vector<std::byte> host(1 << 20, std::byte{7});
    gpu_->copy(Tensor(host.data(), DType::bf16, {1 << 19}),
               Tensor(buffer.get(), DType::bf16, {1 << 19}, gpu_->device()));
    gpu_->synchronize();
    for (const std::byte b : host) ASSERT_EQ(b, std::byte{0});
  }
  EXPECT_GE(gpu_->memory().free + (size_t{8} << 20), before);
}

TEST_F(CudaBackendTest, SaysHowMuchMemoryThereIsWhenItIsTooLittle) {
  const std::string message =
      error_of(ErrorKind::device, [&] { (void)gpu_->allocate(gpu_->memory().total * 2); });
  EXPECT_NE(message.find("are free"), std::string::npos) << message;
  Buffer small = gpu_->allocate(1024);  // the backend goes on
  EXPECT_NE(small, nullptr);
}

TEST_F(CudaBackendTest, RefusesADeviceThatIsNotThere) {
  const std::string message =
      error_of(ErrorKind::device, [] { (void)make_backend("cuda:77", {}); });
  EXPECT_NE(message.find("cuda:77"), std::string::npos) << message;
}

TEST_F(CudaBackendTest, RefusesAHeadSizeByName) {
  Rig rig(*gpu_);
  const PagedSequences paged(rig, DType::bf16, 16, 1, 64, {4}, 1);
  const Tensor q = rig.empty(DType::bf16, {4, 1, 48});
  const KvCache cache{rig.empty(DType::bf16, {4, 1, 16, 48}),
                      rig.empty(DType::bf16, {4, 1, 16, 48})};
  const std::string message = error_of(ErrorKind::invalid_argument, [&] {
    gpu_->attention(q, q, cache, paged.batch(rig, {{0, 0, 4}}), 1.0f, 0);
  });
  EXPECT_NE(message.find("head_dim 48"), std::string::npos) << message;
  EXPECT_EQ(
      error_of(ErrorKind::invalid_argument, [&] { (void)gpu_->scratch_bytes({.head_dim = 48}); }),
      message);
}

TEST_F(CudaBackendTest, LoadsStackedStridedUnalignedPartsOfEveryDtype) {
  Rig rig(*gpu_);
  constexpr int64_t kColumns = 1500, kWide = 4000;  // more than one staging buffer in all
  for (const DType to : {DType::bf16, DType::f32}) {
    std::vector<float> want;
    const auto values = normal_values(700 * kWide, 9);
    std::vector<std::byte> f32_bytes(values.size() * 4 + 1), bf16_bytes(values.size() * 2 + 1),
        f16_bytes(values.size() * 2 + 1);
    for (size_t i = 0; i < values.size(); ++i) {
      const bf16 b(values[i]);
      f16 h;
      h.bits = static_cast<uint16_t>(0x3c00u + i % 1024);  // 1 .. 2, exactly
      std::memcpy(f32_bytes.data() + 1 + 4 * i, &values[i], 4);
      std::memcpy(bf16_bytes.data() + 1 + 2 * i, &b, 2);
      std::memcpy(f16_bytes.data() + 1 + 2 * i, &h, 2);
    }
    const auto part = [&](std::vector<std::byte>& bytes, DType dtype, int64_t rows) {
      return Tensor(bytes.data() + 1, dtype, {rows, kWide}).cols(700, 700 + kColumns);
    };
    const Tensor parts[] = {part(f32_bytes, DType::f32, 700), part(bf16_bytes, DType::bf16, 500),
                            part(f16_bytes, DType::f16, 3)};
    for (const Tensor& p : parts)
      for (int64_t r = 0; r < p.shape[0]; ++r)
        for (int64_t c = 0; c < kColumns; ++c) {
          const size_t i = static_cast<size_t>(r * kWide + 700 + c);
          float value = values[i];
          if (p.dtype == DType::bf16) value = static_cast<float>(bf16(value));
          if (p.dtype == DType::f16) value = 1.0f + static_cast<float>(i % 1024) / 1024.0f;
          want.push_back(to == DType::bf16 ? static_cast<float>(bf16(value)) : value);
        }
    const Tensor w = rig.empty(to, {1203, kColumns});
    gpu_->load(w, parts);
    EXPECT_EQ(rig.floats(w), want) << name_of(to);
  }
}

TEST_F(CudaBackendTest, AGraphDoesWhatItRecorded) {
  Rig rig(*gpu_);
  const Tensor x = rig.upload(normal_values(64 * 256, 1), DType::bf16, {64, 256});
  const Weight w = rig.weight(normal_values(128 * 256, 2), DType::bf16, 128, 256);
  const Tensor y = rig.empty(DType::bf16, {64, 128}), sum = rig.empty(DType::bf16, {64, 128});
  gpu_->gemm(y, x, w);
  const auto product = rig.floats(y);
  const auto graph = gpu_->capture([&] {
    gpu_->gemm(y, x, w);
    gpu_->add(sum, y);
  });
  ASSERT_NE(graph, nullptr);
  EXPECT_EQ(rig.floats(sum), std::vector<float>(product.size(), 0.0f)) << "recording runs nothing";
  graph->launch();
  EXPECT_EQ(rig.floats(sum), product);
}

TEST_F(CudaBackendTest, AGraphMayRecordTheFirstUseOfAKernel) {
  Rig rig(*gpu_);
  const PagedSequences paged(rig, DType::bf16, 16, 2, 128, {900, 30}, 1);
  const Batch batch = paged.batch(rig, {{0, 899, 900}, {1, 0, 30}});
  const Tensor q = rig.upload(normal_values(31 * 4 * 128, 2), DType::bf16, {31, 4, 128});
  const Tensor recorded = rig.empty(DType::bf16, {31, 4, 128}),
               eager = rig.empty(DType::bf16, {31, 4, 128});
  const auto graph =
      gpu_->capture([&] { gpu_->attention(recorded, q, paged.cache, batch, 0.1f, 0); });
  graph->launch();
  gpu_->attention(eager, q, paged.cache, batch, 0.1f, 0);
  EXPECT_EQ(rig.bytes(recorded), rig.bytes(eager));
}

TEST_F(CudaBackendTest, AFailedRecordingLeavesTheStreamUsable) {
  Rig rig(*gpu_);
  const Tensor x = rig.upload(normal_values(64, 1), DType::f32, {1, 64});
  EXPECT_THROW((void)gpu_->capture([&] {
    gpu_->add(x, x);
    throw Error(ErrorKind::engine, "in the middle");
  }),
               Error);
  gpu_->add(x, x);
  gpu_->synchronize();
}

TEST_F(CudaBackendTest, TwoBackendsShareOneDevice) {
  const auto other = make_backend("cuda", {});
  Rig a(*gpu_), b(*other);
  const auto values = normal_values(1000, 5);
  const Tensor x = a.upload(values, DType::f32, {10, 100}),
               y = b.upload(values, DType::f32, {10, 100});
  gpu_->add(x, x);
  other->add(y, y);
  EXPECT_EQ(a.floats(x), b.floats(y));
}

/// The driver is asked before anything is made on a device.
TEST(CudaModule, SaysThatThereIsNoDriver) {
  if (std::filesystem::exists("/proc/driver/nvidia")) GTEST_SKIP() << "there is one";
  EXPECT_EQ(error_of(ErrorKind::device, [] { make_backend("cuda", {}); }),
            "--device cuda: no NVIDIA driver was found; use --device cpu to run without a GPU");
}

/// Needs the module but no device.
TEST(CudaModule, RefusesAProgramOfAnotherBuild) {
  void* module = dlopen(kCudaModuleFile, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (!module)
    module = dlopen((std::string(NANOVLLM_BINARY_DIR) + "/bin/" + kCudaModuleFile).c_str(),
                    RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (!module) GTEST_SKIP() << dlerror();
  auto* open = reinterpret_cast<OpenCudaFunction*>(dlsym(module, kCudaModuleEntry));
  ASSERT_NE(open, nullptr);
  char error[32] = {};
  EXPECT_EQ(open("0.0.0-of-another-build", 0, error, sizeof error), nullptr);
  // Cut to the room there is, and terminated.
  EXPECT_EQ(std::string(error), "libnanovllm-cuda.so belongs to ");
}

}  // namespace
}  // namespace nanovllm
