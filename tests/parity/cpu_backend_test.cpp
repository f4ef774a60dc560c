// The CPU backend's own: threads, memory, and how a device is chosen.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>

#include <gtest/gtest.h>
#include <omp.h>

#include "ops/cpu/memory.h"
#include "ops/cpu/weights.h"
#include "parity/harness.h"

namespace nanovllm::parity {
namespace {

std::unique_ptr<Backend> with_threads(int threads) {
  return make_cpu_backend({.num_threads = threads});
}

/// Some of everything that is cut into shares, as bytes.
std::vector<std::byte> work(Backend& ops, DType dtype) {
  constexpr int64_t kRows = 150, n = 600, k = 700;
  const Operand x(ops, dtype, {kRows, k}, random_values(dtype, kRows * k, 1)),
      y(ops, dtype, {kRows, n}), half(ops, dtype, {kRows, n / 2});
  ops.gemm(y, x, Weight(ops, dtype, n, k, random_values(dtype, n * k, 2)));
  ops.silu_and_mul(half, y);
  const Operand w(ops, dtype, {n / 2}, random_values(dtype, n / 2, 3));
  ops.rms_norm(half, half, w, 1e-6f);
  std::vector<std::byte> bits = y.bits();
  const std::vector<std::byte> more = half.bits();
  bits.insert(bits.end(), more.begin(), more.end());
  return bits;
}

TEST(CpuBackend, TheNumberOfThreadsDoesNotShow) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const auto one = with_threads(1);
    const std::vector<std::byte> want = work(*one, dtype);
    for (const int threads : {2, 3, 7})
      EXPECT_EQ(work(*with_threads(threads), dtype), want)
          << threads << " threads, " << name_of(dtype);
  }
}

TEST(CpuBackend, TwoInOneProcessKeepTheirThreadsAndTheCallersSetting) {
  const int before = omp_get_max_threads();
  const auto one = with_threads(1), three = with_threads(3);
  EXPECT_NE(one->name().find("1 thread,"), std::string::npos) << one->name();
  EXPECT_NE(three->name().find("3 threads,"), std::string::npos) << three->name();
  EXPECT_EQ(work(*one, DType::bf16), work(*three, DType::bf16));
  EXPECT_EQ(work(*three, DType::f32), work(*one, DType::f32));
  EXPECT_EQ(omp_get_max_threads(), before);
}

TEST(CpuBackend, TheEnvironmentsNumberOfThreadsIsBounded) {
  const char* before = std::getenv("OMP_NUM_THREADS");
  const std::string saved = before ? before : "";
  for (const char* text : {"1025", "1000000", "9999999999", "99999999999999999999"}) {
    setenv("OMP_NUM_THREADS", text, 1);
    try {
      make_cpu_backend({});
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
      EXPECT_NE(std::string(error.what()).find("OMP_NUM_THREADS is"), std::string::npos);
      EXPECT_NE(std::string(error.what()).find("between 1 and 1024"), std::string::npos);
    }
  }
  for (const char* text : {"3", "3,2"}) {
    setenv("OMP_NUM_THREADS", text, 1);
    EXPECT_NE(make_cpu_backend({})->name().find("3 threads"), std::string::npos);
  }
  before ? setenv("OMP_NUM_THREADS", saved.c_str(), 1) : unsetenv("OMP_NUM_THREADS");
}

// Tile products read what a plain weight would be loaded as; few processors have them, all can make
// the tiles.
TEST(CpuBackend, DequantisedTilesLieAsPlainOnesDo) {
  std::mt19937 random(1);
  for (const WeightFormat format : {WeightFormat(WeightFormat::int4, 32),
                                    {WeightFormat::int8, 96},
                                    {WeightFormat::e4m3, 96},
                                    {WeightFormat::int4, 45}})
    for (const int64_t n : {7, 32, 50}) {
      const int64_t k = format.group == 45 ? 45 : 96, scales = n * format.groups(k);
      QuantizedRows rows;
      for (int64_t i = 0; i < n * k; ++i)
        rows.numbers.push_back(static_cast<int8_t>(i * 5 % 16 - 8));
      for (int64_t i = 0; i < scales; ++i)
        rows.scales.push_back(0.01f + 0.001f * static_cast<float>(random() % 100));
      if (format.has_zeros()) rows.zeros.assign(static_cast<size_t>(scales), 3);
      std::vector<std::byte> packed(cpu::quantised_bytes(format, n, k));
      cpu::pack_quantised(packed.data(), format, n, k, rows, 1);
      const cpu::QuantisedPanels panels = cpu::quantised_panels(packed.data(), format, k);
      const cpu::WeightLayout layout = cpu::tile_layout(n, k);
      for (const char* isa : {"base", "avx2", "avx512", "avx512_bf16", "amx"}) {
        const cpu::Kernels* all = cpu::find_kernels(isa);
        if (!all) continue;
        const auto& kernels = format.numbers == WeightFormat::int4   ? all->int4
                              : format.numbers == WeightFormat::int8 ? all->int8
                                                                     : all->e4m3;
        std::vector<bf16> plain(static_cast<size_t>(n * k)), panel(static_cast<size_t>(16 * k)),
            want(layout.bytes / 2), got(layout.bytes / 2);
        const int64_t block = (k + 31) / 32 * 32 * 32;  // elements of two panels
        for (int64_t p = 0; p < (n + 15) / 16; ++p) {
          kernels.dequantise(panel.data(), panels, p, 0);
          for (int64_t r = p * 16; r < std::min(n, p * 16 + 16); ++r)
            for (int64_t c = 0; c < k; ++c)
              plain[static_cast<size_t>(r * k + c)] = panel[static_cast<size_t>(c * 16 + r % 16)];
          kernels.dequantise_tiles(got.data() + p / 2 * block + p % 2 * 512, panels, p, 1024);
        }
        cpu::pack_rows(reinterpret_cast<std::byte*>(want.data()), DType::bf16, layout, 0,
                       Tensor(plain.data(), DType::bf16, {n, k}), 1);
        EXPECT_EQ(std::memcmp(got.data(), want.data(), layout.bytes), 0)
            << isa << ", " << format.bits() << " bits, " << n << " x " << k;
      }
    }
}

TEST(CpuBackend, KnowsItsMemoryWhereProcIsNotMounted) {
  const MemoryInfo usual = cpu::memory_info(), without = cpu::memory_info("/nonexistent/meminfo");
  EXPECT_EQ(without.total, usual.total);
  EXPECT_GT(without.free, 0u);
  EXPECT_LE(without.free, without.total);
}

TEST(CpuBackend, AllocatesZeroedAlignedMemory) {
  const auto ops = with_threads(1);
  for (const size_t bytes :
       {size_t{0}, size_t{1}, size_t{1000}, size_t{3} << 20, (size_t{5} << 20) + 7}) {
    const Buffer buffer = ops->allocate(bytes);
    ASSERT_NE(buffer.get(), nullptr);
    EXPECT_EQ(reinterpret_cast<size_t>(buffer.get()) % 256, 0u);
    for (size_t i = 0; i < bytes; ++i) ASSERT_EQ(buffer[i], std::byte{0}) << i << " of " << bytes;
    if (bytes) std::memset(buffer.get(), 1, bytes);
  }
  const MemoryInfo memory = ops->memory();
  EXPECT_GT(memory.free, 0u);
  EXPECT_LE(memory.free, memory.total);
}

TEST(CpuBackend, MoreThanThereIsIsADeviceErrorWithTheSizes) {
  try {
    with_threads(1)->allocate(size_t{1} << 50);
    FAIL() << "a pebibyte was allocated";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::device);
    EXPECT_NE(std::string(error.what()).find("1048576.00 GiB"), std::string::npos) << error.what();
  }
}

TEST(MakeBackend, OpensTheCpuByName) {
  std::string note;
  EXPECT_EQ(make_backend("cpu", {.num_threads = 2}, &note)->device(), (Device{Device::cpu, 0}));
  EXPECT_EQ(note.find("running on cpu, 2 threads"), 0u) << note;
}

TEST(MakeBackend, AutoAlwaysFindsSomethingAndSaysWhat) {
  std::string note;
  const auto backend = make_backend("auto", {}, &note);
  EXPECT_NE(note.find(backend->name()), std::string::npos) << note;
}

TEST(MakeBackend, UnknownDevicesAreErrors) {
  for (const char* device :
       {"", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1x", "cuda0", "CPU", "cuda:99999999999"}) {
    try {
      make_backend(device, {});
      FAIL() << "'" << device << "' was opened";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::device);
      EXPECT_NE(std::string(error.what())
                    .find(std::string("'") + device + "' is not one of auto, cpu, cuda, cuda:N"),
                std::string::npos)
          << error.what();
    }
  }
}

TEST(MakeBackend, AGpuThatIsNotThereIsADeviceErrorWithARemedy) {
  try {
    make_backend("cuda:63", {});
    FAIL() << "cuda:63 was opened";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::device);
    EXPECT_NE(std::string(error.what()).find("--device cpu"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace nanovllm::parity
