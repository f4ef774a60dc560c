// The fixture that tests of operations on rows share.
#pragma once

#include <cmath>

#include "parity/harness.h"

namespace nanovllm::parity {

class RowwiseParity : public ParityTest {
 protected:
  Operand operand(const std::vector<int64_t>& shape, const Values& values, Layout layout = {}) {
    return {ops(), dtype(), shape, values, layout};
  }
  /// A value of the result's type, and whatever f32 arithmetic of a few steps loses on the way.
  double rounding(double value) const { return (eps() + 4 * 0x1p-24) * std::abs(value); }
};

}  // namespace nanovllm::parity
