#!/usr/bin/env bash
# scripts/build.sh [cmake option...]: installs what the build needs, then builds Release in build/release.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install-deps.sh
# Where the default compiler is missing or older than C++20 asks for (Ubuntu 22.04), g++ 12 was installed beside it.
if [ -z "${CXX:-}" ]; then
  version=$(g++ -dumpversion 2>/dev/null || echo 0)
  if [ "${version%%.*}" -lt 12 ]; then export CXX=g++-12; fi
fi
# Structured output needs XGrammar, which no distribution packages; where it cannot be fetched the build goes on without.
if [ ! -e build/xgrammar/recipe ]; then echo "Building XGrammar first: minutes without a word, once."; fi
if ! scripts/build-grammar.sh; then echo "Going on without structured output."; fi
cmake --preset release "$@"
cmake --build --preset release
