#include "constrain/schema/numbers.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "core/check.h"

namespace nanovllm {
namespace {

Expr digits(char first, char last) {
  if (first > last) return never();
  return one_of({{static_cast<char32_t>(first), static_cast<char32_t>(last)}});
}
Expr any_digits(int64_t min, int64_t max) { return repeat(digits('0', '9'), min, max); }

/// Digit strings of one length from `low` to `high`, which has the same length.
Expr same_length(const std::string& low, const std::string& high, size_t at = 0) {
  if (at == low.size()) return {};
  const auto rest = static_cast<int64_t>(low.size() - at - 1);
  const auto all = [](const std::string& text, size_t from, char digit) {
    return text.find_first_not_of(digit, from) == std::string::npos;
  };
  if (all(low, at, '0') && all(high, at, '9')) return any_digits(rest + 1, rest + 1);
  if (low[at] == high[at])
    return sequence({text(low.substr(at, 1)), same_length(low, high, at + 1)});
  const std::string nines(high.size(), '9'), zeros(low.size(), '0');
  return choice({sequence({text(low.substr(at, 1)), same_length(low, nines, at + 1)}),
                 sequence({digits(static_cast<char>(low[at] + 1), static_cast<char>(high[at] - 1)),
                           any_digits(rest, rest)}),
                 sequence({text(high.substr(at, 1)), same_length(zeros, high, at + 1)})});
}

std::string power_of_ten(size_t digits) {
  std::string zeros(digits, '0');
  zeros[0] = '1';
  return zeros;
}

/// Decimal spellings from `low` to `high`, both at least 0.
Expr spelled_between(uint64_t low, std::optional<uint64_t> high) {
  if (high && low > *high) return never();
  std::vector<Expr> choices;
  const std::string first = std::to_string(low);
  const std::string last = high ? std::to_string(*high) : "";
  if (high && first.size() == last.size()) return same_length(first, last);
  choices.push_back(same_length(first, std::string(first.size(), '9')));
  const auto longer = [](int64_t min, int64_t max) {
    return sequence({digits('1', '9'), any_digits(min - 1, max == kUnbounded ? max : max - 1)});
  };
  const auto next = static_cast<int64_t>(first.size()) + 1;
  if (!high) {
    choices.push_back(longer(next, kUnbounded));
  } else {
    const auto before = static_cast<int64_t>(last.size()) - 1;
    if (next <= before) choices.push_back(longer(next, before));
    choices.push_back(same_length(power_of_ten(last.size()), last));
  }
  return choice(std::move(choices));
}

uint64_t magnitude(int64_t value) {
  return value < 0 ? ~static_cast<uint64_t>(value) + 1 : static_cast<uint64_t>(value);
}

/// A bound that is not negative: digits before and behind the point, without trailing zeros.
struct Decimal {
  uint64_t whole = 0;
  std::string fraction{};
};

Decimal to_decimal(double value) {
  check(value < 1e15, ErrorKind::invalid_argument,
        "json: a bound of a number is {}: numbers can be bounded below 1e15", value);
  const std::string shortest = fmt::format("{}", value);
  // Whether 5e-07 or 0.25: as many decimals as it takes to read the same double.
  std::string fixed;
  for (int decimals = 0; decimals <= 16; ++decimals) {
    fixed = fmt::format("{:.{}f}", value, decimals);
    if (std::stod(fixed) == value) break;
  }
  check(std::stod(fixed) == value, ErrorKind::invalid_argument,
        "json: a bound of a number is {}, finer than 16 decimals", shortest);
  const size_t point = std::min(fixed.find('.'), fixed.size());
  Decimal decimal{std::stoull(fixed.substr(0, point)), {}};
  if (point < fixed.size()) decimal.fraction = fixed.substr(point + 1);
  while (decimal.fraction.ends_with('0')) decimal.fraction.pop_back();
  return decimal;
}

// Fractions between two, either of which may be missing.
class Fractions {
 public:
  Fractions(const std::string* low, bool low_exclusive, const std::string* high,
            bool high_exclusive, int64_t most)
      : low_(low),
        high_(high),
        low_exclusive_(low_exclusive),
        high_exclusive_(high_exclusive),
        most_(most) {}

  Expr expr() const {
    const auto [can_end, more] = after(0, low_ != nullptr, high_ != nullptr);
    const Expr fraction = sequence({text("."), more});
    return can_end ? optional(fraction) : fraction;
  }

 private:
  struct Rest {
    bool can_end;
    Expr more;  // one digit or more
  };

  // After `at` digits that are those of the bounds that still bind.
  Rest after(size_t at, bool bound_low, bool bound_high) const {
    const auto left = most_ - static_cast<int64_t>(at);
    if (!bound_low && !bound_high) return {true, left > 0 ? any_digits(1, left) : never()};
    const bool low_left = bound_low && at < low_->size(),
               high_left = bound_high && at < high_->size();
    const bool can_end = (!bound_low || (!low_left && !low_exclusive_)) &&
                         (!bound_high || high_left || !high_exclusive_);
    if (left <= 0) return {can_end, never()};
    const char low = low_left ? (*low_)[at] : '0', high = high_left ? (*high_)[at] : '0';
    std::vector<Expr> choices;
    for (char digit = bound_low ? low : '0'; digit <= (bound_high ? high : '9'); ++digit) {
      const Rest rest = after(at + 1, bound_low && digit == low, bound_high && digit == high);
      const Expr here = digits(digit, digit);
      if (rest.can_end) choices.push_back(here);
      choices.push_back(sequence({here, rest.more}));
    }
    return {can_end, choice(std::move(choices))};
  }

  const std::string *low_, *high_;
  const bool low_exclusive_, high_exclusive_;
  const int64_t most_;
};

/// Numbers that are not negative.
Expr decimals_between(const Bound& low, const std::optional<Bound>& high) {
  if (high && low.value > high->value) return never();
  const Decimal from = to_decimal(low.value);
  const Decimal to = high ? to_decimal(high->value) : Decimal{};
  const uint64_t largest = std::max(from.whole, to.whole);
  const auto most = static_cast<int64_t>(15 - std::to_string(largest).size());
  check(std::ssize(from.fraction) <= most && std::ssize(to.fraction) <= most,
        ErrorKind::invalid_argument, "json: a bound of a number has more than 15 digits");
  const auto number = [](const Expr& whole, const Expr& fraction) {
    return sequence({whole, fraction});
  };
  const auto spelled = [](uint64_t whole) { return text(std::to_string(whole)); };
  const bool over = low.exclusive, under = high && high->exclusive;
  if (high && from.whole == to.whole)
    return number(spelled(from.whole),
                  Fractions(&from.fraction, over, &to.fraction, under, most).expr());
  std::vector<Expr> choices{
      number(spelled(from.whole), Fractions(&from.fraction, over, nullptr, false, most).expr())};
  const Expr any = Fractions(nullptr, false, nullptr, false, most).expr();
  if (!high) {
    choices.push_back(number(spelled_between(from.whole + 1, std::nullopt), any));
  } else {
    if (to.whole > from.whole + 1)
      choices.push_back(number(spelled_between(from.whole + 1, to.whole - 1), any));
    choices.push_back(
        number(spelled(to.whole), Fractions(nullptr, false, &to.fraction, under, most).expr()));
  }
  return choice(std::move(choices));
}

}  // namespace

Expr integers_between(std::optional<int64_t> low, std::optional<int64_t> high) {
  std::vector<Expr> choices;
  if (!low || *low < 0) {
    std::optional<uint64_t> largest;
    if (low) largest = magnitude(*low);
    const uint64_t smallest = high && *high < 0 ? magnitude(*high) : 1;
    choices.push_back(sequence({text("-"), spelled_between(smallest, largest)}));
  }
  if (!high || *high >= 0) {
    std::optional<uint64_t> largest;
    if (high) largest = magnitude(*high);
    choices.push_back(spelled_between(low && *low > 0 ? magnitude(*low) : 0, largest));
  }
  return choice(std::move(choices));
}

// One rule for each remainder: the digits so far, divided by the factor.
Expr multiples(Rules& rules, int64_t factor) {
  std::vector<int> remainders;
  for (int64_t i = 0; i < factor; ++i) remainders.push_back(rules.reserve());
  const auto step = [&](int64_t remainder, int64_t digit) {
    const auto next = static_cast<size_t>((remainder * 10 + digit) % factor);
    return sequence({text(std::to_string(digit)), rule(remainders[next])});
  };
  for (int64_t i = 0; i < factor; ++i) {
    std::vector<Expr> choices;
    for (int64_t digit = 0; digit < 10; ++digit) choices.push_back(step(i, digit));
    if (i == 0) choices.emplace_back();
    rules.define(remainders[static_cast<size_t>(i)], choice(std::move(choices)));
  }
  std::vector<Expr> first;
  for (int64_t digit = 1; digit < 10; ++digit) first.push_back(step(0, digit));
  return choice({text("0"), sequence({optional(text("-")), choice(std::move(first))})});
}

Expr numbers_between(std::optional<Bound> low, std::optional<Bound> high) {
  std::vector<Expr> choices;
  if (!low || low->value < 0) {
    // -x, where x is more than 0.
    const Bound least =
        high && high->value < 0 ? Bound{-high->value, high->exclusive} : Bound{0, true};
    const std::optional<Bound> most =
        low ? std::optional(Bound{-low->value, low->exclusive}) : std::nullopt;
    choices.push_back(sequence({text("-"), decimals_between(least, most)}));
  }
  if (!high || high->value >= 0)
    choices.push_back(decimals_between(low && low->value >= 0 ? *low : Bound{0, false}, high));
  return choice(std::move(choices));
}

}  // namespace nanovllm
