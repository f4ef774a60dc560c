// Counts calls of operator new, for tests that a loop makes none. Replaces the operators of the
// whole program: to be included by one source file of it.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace {
int64_t num_allocations = 0;
}

// Not inlined: a compiler that sees free() but not malloc() warns of a mismatch.
[[gnu::noinline]] void* operator new(size_t size) {
  ++num_allocations;
  if (void* p = std::malloc(size)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }
