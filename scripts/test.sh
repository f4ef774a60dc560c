#!/usr/bin/env bash
# The whole test suite on this machine: installs what the build needs, builds Release with the tests, runs them all.
# Arguments go to ctest: scripts/test.sh -L unit
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/build.sh -DNANOVLLM_TESTS=ON -DNANOVLLM_WERROR="${NANOVLLM_WERROR:-OFF}"
# One more than there are cores: some tests wait most of their time.
ctest --test-dir build/release --output-on-failure -j"$(($(nproc) + 1))" "$@"
