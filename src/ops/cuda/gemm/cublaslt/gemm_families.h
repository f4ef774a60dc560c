// The families of cuBLASLt's algorithms that may compute products: those that give the bits of the
// module's own kernel on this GPU, with this driver and this library. NVIDIA promises no order of
// summation, so each family is compared at the first start; the verdicts are kept in a file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>

namespace nanovllm {

class GemmFamilies {
 public:
  /// cuBLASLt's own numbers: wgmma kernels fed by TMA (Hopper), then mma.sync kernels. No other is
  /// used, whatever a comparison might say: of those that were looked at some add in other orders
  /// only at some sizes.
  static constexpr int32_t kWgmma = 66;
  static constexpr int32_t kCandidates[] = {kWgmma, 21, 23, 24, 41, 42};
  static bool is_candidate(int32_t family);

  /// `file`: where verdicts are kept; empty: nowhere. Takes those that it holds.
  explicit GemmFamilies(std::filesystem::path file);

  /// Whether there are verdicts: else the families are to be compared, and keep() called.
  bool are_known() const { return are_known_; }
  /// Takes what a comparison found. One algorithm that differs speaks for its whole family.
  void learn(int32_t family, bool agrees);
  void keep();
  /// Not where a family was never compared: cuBLASLt proposed none of its algorithms then.
  bool may_use(int32_t family) const;

 private:
  std::filesystem::path file_;
  bool are_known_ = false;
  std::map<int32_t, bool> agrees_;
};

}  // namespace nanovllm
