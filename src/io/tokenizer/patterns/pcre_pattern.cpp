#include "io/tokenizer/patterns/pcre_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <array>
#include <optional>

#include <pcre2.h>

#include "core/check.h"
#include "io/utf8.h"

namespace nanovllm {
namespace {

constexpr uint32_t kMatchLimit = 1'000'000;     // backtracking steps from one starting point
constexpr uint32_t kHeapLimitKiB = 64 << 10;    // of PCRE2's backtracking frames
constexpr size_t kJitStackStart = 32 << 10;     // bytes
constexpr size_t kJitStackLimit = 8 << 20;      // bytes
constexpr size_t kLongestExpression = 1 << 16;  // bytes
constexpr size_t kMostRepeats = 1000;           // in {m,n}: they are made without a callout
constexpr int kOutOfBudget = -1000;             // not one of PCRE2's own errors

template <auto kFree>
struct Freer {
  template <class T>
  void operator()(T* object) const {
    kFree(object);
  }
};

std::string message_of(int error) {
  std::array<PCRE2_UCHAR, 160> text{};
  pcre2_get_error_message(error, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

/// Counts the work of one pcre2_match(): a callout before every item of the expression tells where
/// the match has got to.
struct WorkCount {
  SearchBudget& budget;
  PCRE2_SIZE at;
};
int count_work(pcre2_callout_block* block, void* count) {
  auto& [budget, at] = *static_cast<WorkCount*>(count);
  const PCRE2_SIZE now = block->current_position;
  const size_t distance = now > at ? now - at : at - now;
  at = now;
  return budget.spend(1 + distance) ? 0 : kOutOfBudget;
}

/// Whether "{m,n}" at the start of `regex` repeats more often than kMostRepeats.
bool repeats_too_often(std::string_view regex) {
  size_t number = 0;
  for (const char c : regex.substr(1, regex.find('}') - 1)) {
    if (c != ',' && (c < '0' || c > '9')) return false;
    number = c == ',' ? 0 : std::min(kMostRepeats + 1, 10 * number + static_cast<size_t>(c - '0'));
    if (number > kMostRepeats) return true;
  }
  return false;
}

/// Rewrites what Oniguruma and PCRE2 read differently; refuses what cannot be rewritten.
std::string to_pcre_dialect(std::string_view regex, const std::string& where) {
  // PCRE2's \s would include U+180E, which is no white space.
  static constexpr std::string_view kSpaces =
      "\\t-\\r\\x20\\x85\\xA0\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}"
      "\\x{3000}";
  const auto refuse = [&](std::string_view what) {
    fail(ErrorKind::model, "{}: the regular expression uses {}, which is not supported", where,
         what);
  };
  std::string out;
  bool in_class = false;
  for (size_t i = 0; i < regex.size(); ++i) {
    const char c = regex[i];
    if (c == '\\' && i + 1 < regex.size()) {
      const char next = regex[++i];
      if (next == 's') {
        out.append(in_class ? "" : "[").append(kSpaces).append(in_class ? "" : "]");
      } else if (next == 'S' && !in_class) {
        out.append("[^").append(kSpaces).append("]");
      } else if (next == 'h' || next == 'H') {
        refuse("\\h");
      } else if (next == 'u') {
        if (i + 4 >= regex.size()) refuse("an incomplete \\u");
        out.append("\\x{").append(regex.substr(i + 1, 4)).append("}");
        i += 4;
      } else if (!in_class && ((next >= '1' && next <= '9') || next == 'k' || next == 'g')) {
        refuse("a back reference");
      } else if (next == 'S' || next == 'C' || next == 'K' || next == 'Q' || next == 'E') {
        refuse("\\S in a class, \\C, \\K or \\Q");
      } else {
        out.append({c, next});
      }
      continue;
    }
    if (in_class && c == '[' && !regex.substr(i).starts_with("[:")) refuse("a class in a class");
    if (in_class && regex.substr(i).starts_with("&&")) refuse("an intersection of classes");
    if (!in_class && regex.substr(i).starts_with("(*")) refuse("a verb");
    if (!in_class && regex.substr(i).starts_with("(?P=")) refuse("a back reference");
    if (!in_class && regex.substr(i).starts_with("(?C")) refuse("a callout");
    if (!in_class && c == '{' && repeats_too_often(regex.substr(i)))
      refuse(fmt::format("more than {} repeats", kMostRepeats));
    if (in_class && regex.substr(i).starts_with("[:")) {
      const size_t close = regex.find(":]", i);
      if (close == std::string_view::npos) refuse("a class in a class");
      out += regex.substr(i, close + 2 - i);
      i = close + 1;
      continue;
    }
    if (!in_class && c == '[') {
      in_class = true;
      out += c;
      // A bracket right after the opening one is a member.
      if (regex.substr(i + 1).starts_with("^")) out += regex[++i];
      if (regex.substr(i + 1).starts_with("]")) out += regex[++i];
      continue;
    }
    if (in_class && c == ']') in_class = false;
    out += c;
  }
  return out;
}

}  // namespace

struct PcrePattern::Code {
  std::unique_ptr<pcre2_code, Freer<pcre2_code_free>> code;
  std::unique_ptr<pcre2_match_context, Freer<pcre2_match_context_free>> context;
};

PcrePattern::PcrePattern(std::string_view regex, const std::string& where) {
  check(regex.size() <= kLongestExpression, ErrorKind::model,
        "{}: the regular expression has {} bytes, more than {}", where, regex.size(),
        kLongestExpression);
  const std::string dialect = to_pcre_dialect(regex, where);
  auto code = std::make_unique<Code>();
  std::unique_ptr<pcre2_compile_context, Freer<pcre2_compile_context_free>> compile_context(
      pcre2_compile_context_create(nullptr));
  check(compile_context != nullptr, "out of memory");
  pcre2_set_newline(compile_context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE offset = 0;
  code->code.reset(pcre2_compile(
      reinterpret_cast<PCRE2_SPTR>(dialect.data()), dialect.size(),
      // Ruby's ^ and $ match at every line.
      PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C | PCRE2_AUTO_CALLOUT,
      &error, &offset, compile_context.get()));
  check(code->code != nullptr, ErrorKind::model,
        "{}: the regular expression is not supported: {} (at byte {} of {} bytes)", where,
        message_of(error), offset, dialect.size());
  pcre2_jit_compile(code->code.get(), PCRE2_JIT_COMPLETE);  // without JIT matching only gets slower
  code->context.reset(pcre2_match_context_create(nullptr));
  check(code->context != nullptr, "out of memory");
  pcre2_set_match_limit(code->context.get(), kMatchLimit);
  pcre2_set_heap_limit(code->context.get(), kHeapLimitKiB);
  code_ = std::move(code);
}

PcrePattern::~PcrePattern() = default;

void PcrePattern::find_all(std::string_view text, std::vector<Span>& matches,
                           SearchBudget& budget) const {
  const std::unique_ptr<pcre2_match_data, Freer<pcre2_match_data_free>> data(
      pcre2_match_data_create(1, nullptr));
  const std::unique_ptr<pcre2_match_context, Freer<pcre2_match_context_free>> context(
      pcre2_match_context_copy(code_->context.get()));
  check(data != nullptr && context != nullptr, "out of memory");
  WorkCount count{budget, 0};
  pcre2_set_callout(context.get(), count_work, &count);
  std::unique_ptr<pcre2_jit_stack, Freer<pcre2_jit_stack_free>> stack;
  std::optional<size_t> last_end;
  for (size_t at = 0; at <= text.size();) {
    int result = 0;
    count.at = at;
    while (true) {
      result = pcre2_match(code_->code.get(), reinterpret_cast<PCRE2_SPTR>(text.data()),
                           text.size(), at, PCRE2_NO_UTF_CHECK, data.get(), context.get());
      if (result != PCRE2_ERROR_JIT_STACKLIMIT || stack != nullptr) break;
      stack.reset(pcre2_jit_stack_create(kJitStackStart, kJitStackLimit, nullptr));
      check(stack != nullptr, "out of memory");
      pcre2_jit_stack_assign(context.get(), nullptr, stack.get());
    }
    if (result == PCRE2_ERROR_NOMATCH) return;
    if (result == kOutOfBudget || result == PCRE2_ERROR_MATCHLIMIT) refuse_work(text);
    check(result >= 0, ErrorKind::invalid_argument,
          "the tokenizer's regular expression fails on this text of {} bytes: {}", text.size(),
          message_of(result));
    const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(data.get());
    const Span found{bounds[0], bounds[1]};
    // A look-behind cannot move the match back, but \K could: it is refused above.
    if (found.size() == 0 && last_end == found.end) {
      if (at == text.size()) return;
      at += decode_utf8(text.data() + at)
                .length;  // an empty match right after a match does not count
      continue;
    }
    matches.push_back(found);
    last_end = at = found.end;
  }
}

}  // namespace nanovllm
