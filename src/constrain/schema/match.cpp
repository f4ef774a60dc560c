#include "constrain/schema/match.h"

#include <set>
#include <string>

#include "core/check.h"
#include "io/utf8.h"

namespace nanovllm {
namespace {

using Places = std::set<size_t>;

class Matcher {
 public:
  explicit Matcher(std::string_view utf8) : text_(to_utf32(utf8)) {}
  size_t size() const { return text_.size(); }

  /// Where `e` can end that begins at one of `from`.
  Places ends(const Expr& e, const Places& from) {
    steps_ += from.size() + 1;
    check(steps_ < kMaxSteps, ErrorKind::invalid_argument,
          "json: a pattern takes more than {} steps on a key or value of the schema", kMaxSteps);
    Places out;
    switch (e.kind) {
      case Expr::Kind::set:
        for (const size_t at : from)
          if (at < text_.size() && e.set.contains(text_[at])) out.insert(at + 1);
        return out;
      case Expr::Kind::sequence:
        out = from;
        for (const Expr& part : e.parts) out = ends(part, out);
        return out;
      case Expr::Kind::choice:
        for (const Expr& part : e.parts) out.merge(ends(part, from));
        return out;
      case Expr::Kind::repeat:
        return repeated(e, from);
      default:
        return out;  // patterns have no texts and rules
    }
  }

 private:
  static constexpr size_t kMaxSteps = 1'000'000;

  Places repeated(const Expr& e, Places at) {
    for (int64_t i = 0; i < e.min && !at.empty(); ++i) at = ends(e.parts[0], at);
    Places all = at;
    for (int64_t i = e.min; e.max == kUnbounded || i < e.max; ++i) {
      at = ends(e.parts[0], at);
      const size_t before = all.size();
      all.insert(at.begin(), at.end());
      if (all.size() == before) break;
    }
    return all;
  }

  const std::u32string text_;
  size_t steps_ = 0;
};

}  // namespace

bool matches(const Expr& e, std::string_view text) {
  Matcher matcher(text);
  return matcher.ends(e, {0}).contains(matcher.size());
}

}  // namespace nanovllm
