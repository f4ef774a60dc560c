// Fields that quantization_config has in several methods' spellings, checked.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "io/json_object.h"

namespace nanovllm {

/// Throws Error(model) with a message in fmt syntax, behind the file's name.
template <class... Args>
[[noreturn]] void refuse(const JsonObject& in, fmt::format_string<Args...> format, Args&&... args) {
  in.refuse(fmt::format(format, std::forward<Args>(args)...));
}

/// Refuses a text that is none of `known`; null is `absent`.
inline std::string one_of(const JsonObject& in, const char* key, std::string_view absent,
                          std::initializer_list<std::string_view> known) {
  std::string value = in.optional_string(key).value_or(std::string(absent));
  if (std::find(known.begin(), known.end(), value) == known.end())
    refuse(in, "{} {} is not supported: use {}", in.path(key), quote(value),
           fmt::join(known, " or "));
  return value;
}

inline int64_t group_size_of(const JsonObject& in, const char* key = "group_size") {
  const int64_t size = in.integer(key, -1, int64_t{1} << 20);
  if (size != -1 && size != 32 && size != 64 && size != 128)
    refuse(in, "{} {} is not supported: use 32, 64, 128 or -1", in.path(key), size);
  return size;
}

/// Refuses a number that is none of `known`.
inline int bits_of(const JsonObject& in, const char* key, std::initializer_list<int> known) {
  const auto bits = static_cast<int>(in.integer(key, 1, 64));
  if (std::find(known.begin(), known.end(), bits) == known.end())
    refuse(in, "{} {} is not supported: use {}", in.path(key), bits, fmt::join(known, " or "));
  return bits;
}

}  // namespace nanovllm
