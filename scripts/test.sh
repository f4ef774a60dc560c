#!/usr/bin/env bash
# The whole test suite on this machine: installs what the build needs, builds Release with the tests, runs them all.
# Arguments go to ctest: scripts/test.sh -L unit
set -euo pipefail
cd "$(dirname "$0")/.."
python=(-DNANOVLLM_PYTHON=OFF)
if scripts/python-env.sh; then python=(-DNANOVLLM_PYTHON=ON -DPython_EXECUTABLE="$PWD/build/python-env/bin/python"); fi
scripts/build.sh "${python[@]}" -DNANOVLLM_TESTS=ON -DNANOVLLM_WERROR="${NANOVLLM_WERROR:-OFF}"
if ! scripts/fetch-schema-suite.sh; then echo "Going on without it."; fi
# One more than there are cores: some tests wait most of their time.
ctest --test-dir build/release --output-on-failure -j"$(($(nproc) + 1))" "$@"
