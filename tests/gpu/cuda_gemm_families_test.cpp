// cuBLASLt's kernels are used only where they were seen to give the bits of our own; the verdicts
// are kept in a file.
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include <gtest/gtest.h>

#include "gpu/cuda_trial.h"
#include "gpu/gpu_test.h"
#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

/// Backends begin in an empty cache folder.
class CudaGemmFamilies : public GpuTest {
 protected:
  void SetUp() override {
    setenv("XDG_CACHE_HOME", directory_.path().c_str(), 1);
    GpuTest::SetUp();
    if (gpu_) (void)product(*gpu_);  // until then the comparison may be under way
  }
  void TearDown() override { unsetenv("XDG_CACHE_HOME"); }

  std::filesystem::path file() const {
    for (const auto& entry : std::filesystem::directory_iterator(directory_.path() / "nanovllm"))
      if (entry.path().filename().string().starts_with("gemm-families-")) return entry.path();
    return {};
  }
  std::string read() const {
    std::ostringstream text;
    text << std::ifstream(file(), std::ios::binary).rdbuf();
    return text.str();
  }
  static GemmComparison compare(Backend& gpu) {
    GemmComparison found;
    EXPECT_EQ(module_entry<CompareGemmFunction>(gpu, kCompareGemmEntry)(&gpu, &found), 0);
    return found;
  }
  /// A product that Hopper's own kernels leave to cuBLASLt: 400 rows.
  static std::vector<std::byte> product(Backend& gpu) {
    constexpr int64_t kRows = 400, kColumns = 1536, kDepth = 2048;
    Rig rig(gpu);
    const Tensor x = rig.upload(normal_values(kRows * kDepth, 1), DType::bf16, {kRows, kDepth}),
                 y = rig.empty(DType::bf16, {kRows, kColumns});
    const Weight w = rig.weight(normal_values(kColumns * kDepth, 2), DType::bf16, kColumns, kDepth);
    gpu.gemm(y, x, w);
    return rig.bytes(y);
  }

  TempDirectory directory_;
};

TEST_F(CudaGemmFamilies, WhatIsUsedHasTheBitsOfOurOwnKernelAndTheComparisonSeesOthers) {
  const GemmComparison found = compare(*gpu_);
  std::printf("  used %d, of these differ %d; others %d, of these differ %d\n%s", found.used,
              found.used_differ, found.others, found.others_differ, read().c_str());
  EXPECT_EQ(found.used_differ, 0);
  EXPECT_GT(found.used, 0);
  EXPECT_GT(found.others_differ, 0);
}

TEST_F(CudaGemmFamilies, VerdictsOfTheFirstStartServeTheNext) {
  using Clock = std::chrono::steady_clock;
  for (const bool first : {true, false}) {  // for the reader: the library has been opened before
    if (first) std::filesystem::remove(file());
    std::string why;
    const auto begin = Clock::now();
    const auto ms = [&] {
      return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
    };
    auto gpu = open_gpu(why);
    const double opened = ms();
    gpu.reset();  // waits for what it does beside
    std::printf("  %s start: %.1f ms, all done after %.1f\n", first ? "first" : "next", opened,
                ms());
  }
  const std::string kept = read();
  EXPECT_NE(kept.find("agrees"), std::string::npos) << kept;
  const int used = compare(*gpu_).used;
  const auto before = std::filesystem::last_write_time(file());
  std::string why;
  const auto again = open_gpu(why);
  EXPECT_EQ(compare(*again).used, used);
  EXPECT_EQ(std::filesystem::last_write_time(file()), before);
}

TEST_F(CudaGemmFamilies, FamiliesThatDifferAreNotUsedAndNoBitShowsIt) {
  const auto expected = product(*gpu_);
  std::string planted = read();
  for (size_t at; (at = planted.find("agrees")) != std::string::npos;)
    planted.replace(at, 6, "differs");
  std::ofstream(file(), std::ios::binary) << planted;
  std::string why;
  const auto suspicious = open_gpu(why);
  EXPECT_EQ(compare(*suspicious).used, 0);
  EXPECT_EQ(product(*suspicious), expected);
  EXPECT_EQ(read(), planted);
}

TEST_F(CudaGemmFamilies, ABrokenFileIsMadeAnew) {
  const std::string kept = read();
  for (const std::string& broken : {std::string(), std::string("nonsense"),
                                    kept.substr(0, kept.size() / 2), std::string(1 << 22, 'x')}) {
    std::ofstream(file(), std::ios::binary) << broken;
    std::string why;
    EXPECT_NE(open_gpu(why), nullptr) << why;
    EXPECT_EQ(read(), kept);
  }
}

}  // namespace
}  // namespace nanovllm
