#include "constrain/schema/formats.h"

#include <algorithm>
#include <string>
#include <utility>

#include "constrain/regex.h"

namespace nanovllm {
namespace {

#define YEAR_ "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
#define LEAP_YEAR_                                                            \
  "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579]" \
  "[26])00)"
#define DATE_                                         \
  "(?:" YEAR_                                         \
  "-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])" \
  "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|" LEAP_YEAR_ "-02-29)"
#define TIME_                                                             \
  "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,6})?(?:Z|[+-]" \
  "(?:[01][0-9]|2[0-3]):[0-5][0-9])"
#define OCTET_ "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
#define LABEL_ "[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
#define ATOM_ "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
#define HEX_ "[0-9A-Fa-f]"

struct Format {
  std::string_view name, pattern;
};
// RFC 3339 (dates, times, without leap seconds), RFC 4122, RFC 5321 (a local part of dot-atoms),
// RFC 1123 (both without its lengths), RFC 2673, RFC 4291 (without the mixed spelling), RFC 3986.
constexpr Format kFormats[] = {
    {"date", DATE_},
    {"time", TIME_},
    {"date-time", DATE_ "T" TIME_},
    {"duration",
     "P(?:[0-9]{1,9}W|(?:[0-9]{1,9}D|[0-9]{1,9}M(?:[0-9]{1,9}D)?|[0-9]{1,9}Y(?:[0-9]{1,9}M(?:[0-9]{"
     "1,9}D)?)?)"
     "(?:T(?:[0-9]{1,9}H(?:[0-9]{1,9}M(?:[0-9]{1,9}S)?)?|[0-9]{1,9}M(?:[0-9]{1,9}S)?|[0-9]{1,9}S))?"
     "|T(?:[0-9]{1,9}H(?:[0-9]{1,9}M(?:[0-9]{1,9}S)?)?|[0-9]{1,9}M(?:[0-9]{1,9}S)?|[0-9]{1,9}S))"},
    {"uuid", HEX_ "{8}-" HEX_ "{4}-" HEX_ "{4}-" HEX_ "{4}-" HEX_ "{12}"},
    {"email", ATOM_ "(?:\\." ATOM_ ")*@" LABEL_ "(?:\\." LABEL_ ")*"},
    {"hostname", LABEL_ "(?:\\." LABEL_ ")*"},
    {"ipv4", OCTET_ "(?:\\." OCTET_ "){3}"},
    {"ipv6", "(?:" HEX_ "{1,4}:){7}" HEX_ "{1,4}|::(?:" HEX_ "{1,4}:){0,6}" HEX_ "{1,4}|::|(?:" HEX_
             "{1,4}:){1,7}:|" HEX_ "{1,4}:(?::" HEX_ "{1,4}){1,6}|(?:" HEX_ "{1,4}:){2}(?::" HEX_
             "{1,4}){1,5}|(?:" HEX_ "{1,4}:){3}(?::" HEX_ "{1,4}){1,4}|(?:" HEX_
             "{1,4}:){4}(?::" HEX_ "{1,4}){1,3}|(?:" HEX_ "{1,4}:){5}(?::" HEX_ "{1,4}){1,2}"},
    {"uri",
     "[A-Za-z][A-Za-z0-9+.-]*:(?://[A-Za-z0-9._~-]+(?::[0-9]{1,4})?(?:/"
     "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%" HEX_ "{2})*)*|(?:[A-Za-z0-9._~!$&'()*+,;=@-]|%" HEX_
     "{2})(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%" HEX_
     "{2})*)(?:\\?(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%" HEX_
     "{2})*)?(?:#(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%" HEX_ "{2})*)?"}};

// The patterns of Zod's z.email() and of Pydantic's Decimal look around, which a grammar cannot:
// each is followed by one of the same texts that does not.
constexpr std::pair<std::string_view, std::string_view> kSamePatterns[] = {
    {R"(^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$)",
     R"(^(?:[A-Za-z0-9_'+-]\.?)*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9-]*\.)+[A-Za-z]{2,}$)"},
    {R"(^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$)", R"(^[+-]?(?:\d+\.?\d*|\.\d+)$)"}};

#undef YEAR_
#undef LEAP_YEAR_
#undef DATE_
#undef TIME_
#undef OCTET_
#undef LABEL_
#undef ATOM_
#undef HEX_

}  // namespace

// OpenAPI has the first two, Pydantic writes the last two for bytes and paths.
bool is_any_text(std::string_view format) {
  return format == "password" || format == "binary" || format == "path";
}

std::optional<Expr> format_expr(std::string_view name) {
  const auto* const format = std::ranges::find(kFormats, name, &Format::name);
  if (format == std::end(kFormats)) return std::nullopt;
  return parse_regex(format->pattern, name);
}

Expr pattern_expr(std::string_view pattern) {
  for (const auto& [known, same] : kSamePatterns)
    if (pattern == known) pattern = same;
  return parse_regex_search(pattern, "json: pattern");
}

std::vector<std::string_view> format_names() {
  std::vector<std::string_view> names;
  for (const Format& format : kFormats) names.push_back(format.name);
  return names;
}

}  // namespace nanovllm
