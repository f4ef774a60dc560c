// The verdicts over cuBLASLt's families and the file that keeps them. No GPU is needed: how they
// are found is the business of tests/gpu/cuda_gemm_families_test.cpp.
#include "ops/cuda/gemm/cublaslt/gemm_families.h"

#include <fstream>
#include <sstream>

#include <gtest/gtest.h>

#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

class GemmFamiliesFile : public testing::Test {
 protected:
  void write(const std::string& text) const { std::ofstream(file_, std::ios::binary) << text; }
  std::string read() const {
    std::ostringstream text;
    text << std::ifstream(file_, std::ios::binary).rdbuf();
    return text.str();
  }
  void expect_ignored(const std::string& text) const {
    write(text);
    const GemmFamilies families(file_);
    EXPECT_FALSE(families.are_known()) << text.substr(0, 80);
    EXPECT_FALSE(families.may_use(21)) << text.substr(0, 80);
  }

  TempDirectory directory_;
  std::filesystem::path file_ = directory_.path() / "nanovllm" / "families";
};

TEST(GemmFamilies, OnlyFamiliesThatAlwaysAgreedAreUsed) {
  GemmFamilies families({});
  EXPECT_FALSE(families.are_known());
  for (const int32_t family : GemmFamilies::kCandidates) EXPECT_FALSE(families.may_use(family));
  families.learn(21, true);
  families.learn(23, true);
  families.learn(23, false);
  families.learn(23, true);
  families.learn(24, false);
  families.learn(13, true);  // cuBLASLt's matrix-vector kernels: no candidate
  families.keep();
  EXPECT_TRUE(families.are_known());
  EXPECT_TRUE(families.may_use(21));
  EXPECT_FALSE(families.may_use(23));
  EXPECT_FALSE(families.may_use(24));
  EXPECT_FALSE(families.may_use(13));
  EXPECT_FALSE(families.may_use(GemmFamilies::kWgmma));
}

TEST_F(GemmFamiliesFile, VerdictsAreReadBackAndNothingElseIsLeft) {
  {
    GemmFamilies families(file_);
    families.learn(21, true);
    families.learn(42, false);
    families.keep();
  }
  const GemmFamilies again(file_);
  EXPECT_TRUE(again.are_known());
  EXPECT_TRUE(again.may_use(21));
  EXPECT_FALSE(again.may_use(42));
  EXPECT_FALSE(again.may_use(23));
  int files = 0;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::directory_iterator(file_.parent_path()))
    ++files;
  EXPECT_EQ(files, 1);
}

TEST_F(GemmFamiliesFile, WhereNoFamilyWasProposedThatIsKeptToo) {
  GemmFamilies(file_).keep();
  EXPECT_TRUE(GemmFamilies(file_).are_known());
}

TEST_F(GemmFamiliesFile, ABrokenFileIsAsNone) {
  GemmFamilies families(file_);
  families.learn(21, true);
  families.learn(23, true);
  families.keep();
  const std::string whole = read();
  for (size_t length = 0; length + 1 < whole.size(); ++length)
    expect_ignored(whole.substr(0, length));
  expect_ignored("some other file\n" + whole);
  expect_ignored(whole.substr(0, whole.find("21")) + "21 perhaps\nend\n");
  expect_ignored(whole.substr(0, whole.find("21")) + "21 agrees 23\nend\n");
  expect_ignored(whole.substr(0, whole.find("21")) + "13 agrees\nend\n");
  expect_ignored(whole + std::string(1 << 20, '\n'));
  expect_ignored(std::string(4096, '\0'));
  families.keep();
  EXPECT_EQ(read(), whole);
}

TEST_F(GemmFamiliesFile, AFileThatCannotBeReadOrWrittenIsNoError) {
  std::filesystem::create_directories(file_);  // a directory in its place
  GemmFamilies families(file_);
  EXPECT_FALSE(families.are_known());
  families.learn(21, true);
  families.keep();
  EXPECT_TRUE(families.may_use(21));
  EXPECT_TRUE(std::filesystem::is_directory(file_));
  int left = 0;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::directory_iterator(file_.parent_path()))
    ++left;
  EXPECT_EQ(left, 1);
}

}  // namespace
}  // namespace nanovllm
