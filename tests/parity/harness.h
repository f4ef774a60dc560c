// The parts of every parity test: the backends there are, operands whose surroundings are
// guarded, and comparison with a reference computed in float64.
//
// Operands are rounded to their dtype before anything is computed from them, so that only the
// operation's own error is measured. Every operand lies in a buffer of sentinel bytes, its rows
// possibly apart; after the operation all bytes that are not its elements must still be sentinels.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ops/backend.h"

namespace nanovllm::parity {

/// A device under test. Instances are opened once per program; `get` skips the test where there is
/// no such device.
struct BackendCase {
  std::string name;
};
inline void PrintTo(const BackendCase& which, std::ostream* out) { *out << which.name; }
/// "cpu": the best kernels; "cpu_base", "cpu_avx2", ...: the others, without oneDNN; "cuda".
std::vector<BackendCase> backend_cases();
/// Null where there is no such device or instruction set here.
Backend* open_backend(const BackendCase& which);

using Case = std::tuple<BackendCase, DType>;
std::string case_name(const testing::TestParamInfo<Case>& info);
std::string backend_name(const testing::TestParamInfo<BackendCase>& info);

/// A test of one backend and one dtype.
class ParityTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    backend_ = open_backend(std::get<0>(GetParam()));
    if (!backend_) GTEST_SKIP() << "no " << std::get<0>(GetParam()).name << " here";
  }
  Backend& ops() const { return *backend_; }
  DType dtype() const { return std::get<1>(GetParam()); }
  /// The relative error of one rounding to dtype.
  double eps() const { return dtype() == DType::f32 ? 0x1p-24 : 0x1p-8; }

 private:
  Backend* backend_ = nullptr;
};

/// A test of one backend whose operation has no choice of dtype.
class BackendTest : public testing::TestWithParam<BackendCase> {
 protected:
  void SetUp() override {
    backend_ = open_backend(GetParam());
    if (!backend_) GTEST_SKIP() << "no " << GetParam().name << " here";
  }
  Backend& ops() const { return *backend_; }

 private:
  Backend* backend_ = nullptr;
};

#define NANOVLLM_PARITY(suite)                                                        \
  INSTANTIATE_TEST_SUITE_P(                                                           \
      Ops, suite,                                                                     \
      testing::Combine(testing::ValuesIn(nanovllm::parity::backend_cases()),          \
                       testing::Values(nanovllm::DType::f32, nanovllm::DType::bf16)), \
      nanovllm::parity::case_name)
#define NANOVLLM_PARITY_BACKENDS(suite)                                                      \
  INSTANTIATE_TEST_SUITE_P(Ops, suite, testing::ValuesIn(nanovllm::parity::backend_cases()), \
                           nanovllm::parity::backend_name)

using Values = std::vector<double>;

double round_to(DType dtype, double value);
/// Normal random numbers, rounded to dtype.
Values random_values(DType dtype, int64_t count, uint32_t seed, double scale = 1.0);
Values uniform_values(DType dtype, int64_t count, uint32_t seed, double low, double high);

/// How an operand lies in its buffer: `lead` elements before every row and `trail` behind it (the
/// other columns of a wider matrix).
struct Layout {
  int64_t lead = 0, trail = 0;
};

/// An operand on a device among sentinel bytes. A row is everything behind the first axis.
class Operand {
 public:
  Operand(Backend& ops, DType dtype, std::vector<int64_t> shape, Layout layout = {});
  Operand(Backend& ops, DType dtype, std::vector<int64_t> shape, const Values& values,
          Layout layout = {});

  Tensor view() const { return view_; }
  operator Tensor() const { return view_; }
  int64_t numel() const { return view_.numel(); }
  void set(const Values& values);
  Values get() const;
  /// The elements' bytes, for comparisons bit for bit.
  std::vector<std::byte> bits() const;
  /// Fails the test if a byte outside the elements changed.
  void expect_guards(const char* name) const;

 private:
  std::vector<std::byte> download() const;

  Backend& ops_;
  size_t bytes_;
  Buffer buffer_;
  Tensor whole_, view_;
  int64_t row_ = 1, rows_ = 1;
};

/// i32 operand without surroundings of interest.
Operand ints(Backend& ops, const std::vector<int32_t>& values);

/// A weight in the backend's own layout.
class Weight {
 public:
  Weight(Backend& ops, WeightFormat plain, int64_t n, int64_t k, const Values& values);
  Weight(Backend& ops, DType dtype, int64_t n, int64_t k, const Values& values)
      : Weight(ops, plain_format(dtype), n, k, values) {}
  operator nanovllm::Weight() const { return view_; }

 private:
  Buffer buffer_;
  nanovllm::Weight view_;
};

/// Fails, naming the worst element, if |got - want| > bound(i) somewhere (NaN is never within a
/// bound, save where NaN is wanted).
void expect_close(const Values& got, const Values& want, const std::function<double(size_t)>& bound,
                  const std::string& what);
void expect_equal(const Values& got, const Values& want, const std::string& what);

}  // namespace nanovllm::parity
