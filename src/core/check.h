// The only assertion vocabulary: check() and fail() throw Error; they are always on.
#pragma once

#include <utility>

#include <fmt/format.h>

#include "nanovllm/error.h"

namespace nanovllm {

template <class... Args>
[[noreturn]] void fail(ErrorKind kind, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(kind, fmt::format(format, std::forward<Args>(args)...));
}

/// A broken invariant of our own: ErrorKind::engine. For bad input use the overload with a kind.
template <class... Args>
void check(bool condition, fmt::format_string<Args...> format, Args&&... args) {
  if (!condition) [[unlikely]]
    fail(ErrorKind::engine, format, std::forward<Args>(args)...);
}

template <class... Args>
void check(bool condition, ErrorKind kind, fmt::format_string<Args...> format, Args&&... args) {
  if (!condition) [[unlikely]]
    fail(kind, format, std::forward<Args>(args)...);
}

}  // namespace nanovllm
