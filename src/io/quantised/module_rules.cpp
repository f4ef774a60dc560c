#include "io/quantised/module_rules.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <algorithm>
#include <string_view>

#include <fmt/format.h>
#include <pcre2.h>

#include "core/check.h"

namespace nanovllm {
namespace {

constexpr size_t kMostExpressions = 64;
constexpr size_t kLongestExpression = 1024;     // bytes
constexpr uint32_t kMostBacktracking = 10'000;  // steps of one match

}  // namespace

void ModuleRules::FreeCode::operator()(pcre2_code* code) const { pcre2_code_free(code); }

void ModuleRules::add(const JsonObject& in, const char* key, const std::string& text) {
  if (!text.starts_with("re:")) {
    names.insert(text);
    return;
  }
  const std::string_view expression = std::string_view(text).substr(3);
  int error = 0;
  PCRE2_SIZE at = 0;
  std::unique_ptr<pcre2_code, FreeCode> code;
  if (expressions_.size() < kMostExpressions && expression.size() <= kLongestExpression)
    code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(expression.data()), expression.size(),
                             PCRE2_ANCHORED | PCRE2_UTF, &error, &at, nullptr));
  if (!code)
    in.refuse(
        fmt::format("{} {} is not an expression that is understood", in.path(key), quote(text)));
  expressions_.push_back(std::move(code));
}

/// Whether a name is some of the module's parts, one behind the other.
bool ModuleRules::has_part(const std::string& module) const {
  const std::string parts = module + ".";
  for (size_t begin = 0; begin < parts.size(); begin = parts.find('.', begin) + 1)
    for (size_t end = parts.find('.', begin); end != parts.npos; end = parts.find('.', end + 1))
      if (names.contains(parts.substr(begin, end - begin))) return true;
  return false;
}

bool ModuleRules::matches(const std::string& module) const {
  if (names.contains(module)) return true;
  if (parts_too && has_part(module)) return true;
  return std::any_of(expressions_.begin(), expressions_.end(), [&](const auto& code) {
    const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> data(
        pcre2_match_data_create(1, nullptr), pcre2_match_data_free);
    const std::unique_ptr<pcre2_match_context, decltype(&pcre2_match_context_free)> context(
        pcre2_match_context_create(nullptr), pcre2_match_context_free);
    pcre2_set_match_limit(context.get(), kMostBacktracking);
    const int result = pcre2_match(code.get(), reinterpret_cast<PCRE2_SPTR>(module.data()),
                                   module.size(), 0, 0, data.get(), context.get());
    check(result >= 0 || result == PCRE2_ERROR_NOMATCH, ErrorKind::model,
          "config.json: quantization_config: an expression takes too long on {}", module);
    return result >= 0;
  });
}

}  // namespace nanovllm
