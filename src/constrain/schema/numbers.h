// Bounded numbers as expressions of their decimal digits.
#pragma once

#include <cstdint>
#include <optional>

#include "constrain/expr.h"

namespace nanovllm {

/// Integers from `low` to `high`; none: without a bound on that side.
Expr integers_between(std::optional<int64_t> low, std::optional<int64_t> high);

/// Multiples of `factor`, 1 to 100.
Expr multiples(Rules& rules, int64_t factor);

/// A bound of numbers.
struct Bound {
  double value = 0;
  bool exclusive = false;
};

/// Decimal numbers between the bounds, without exponents, with as many digits behind the point as
/// a double tells apart there. Throws Error(invalid_argument) for bounds that are too large or too
/// fine for that.
Expr numbers_between(std::optional<Bound> low, std::optional<Bound> high);

}  // namespace nanovllm
