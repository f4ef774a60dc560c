#!/usr/bin/env bash
# The checks that are too long for every commit: scripts/nightly.sh [SECONDS, default 1200]
# The server under mixed random traffic for so long (tests/soak), with 10,000 idle connections in the middle; the server's tests under TSan;
# the long runs of the block manager and the scheduler; the fuzzers of the server's inputs for a tenth of that time; all schemas of programs,
# 10,000 answers of random weights under random structures and the Python package's threads and engines, where there is XGrammar and a
# Python environment. Builds what it needs in build/release, build/tsan and build/fuzz. One line for each stage as it ends, and the soak's
# lines of progress; logs are in build/nightly. Exit 1 if a stage failed.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-1200}
logs=build/nightly
mkdir -p "$logs"
passed=0 failed=0

# stage NAME COMMAND...: its output goes to a log and to $show, and its last lines to the terminal if it fails.
stage() {
  local name=$1 log=$logs/$1.log begin=$SECONDS
  shift
  if "$@" 2>&1 | tee "$log" >"${show:-/dev/null}"; then
    passed=$((passed + 1))
    printf '%-10s passed  %5d s  %s\n' "$name" $((SECONDS - begin)) "$(tail -n 1 "$log")"
  else
    failed=$((failed + 1))
    tail -n 40 "$log"
    printf '%-10s FAILED  %5d s\n' "$name" $((SECONDS - begin))
  fi
}

build() {
  cmake --preset release -DNANOVLLM_TESTS=ON && cmake --build --preset release --target nanovllm block_manager_model_test scheduler_model_test
}
soak() { python3 -B tests/soak/serve_soak.py build/release/bin/nanovllm models/demo "$seconds"; }
# One OpenMP thread: the runtime of more is not instrumented.
threads() {
  local tests
  mapfile -t tests < <(git ls-files 'tests/server/*_test.cpp' | xargs -n1 basename -s .cpp)
  cmake --preset tsan && cmake --build --preset tsan --target "${tests[@]}" &&
    echo 'race:signal_set_service::close_descriptors' >build/tsan/suppressions &&  # Asio's pipe of signals, which orders the two
    TSAN_OPTIONS="suppressions=$PWD/build/tsan/suppressions" OMP_NUM_THREADS=1 ctest --test-dir build/tsan --output-on-failure -j"$(nproc)" -L server
}
models() {
  for test in block_manager_model_test scheduler_model_test; do
    NANOVLLM_LONG_TESTS=1 build/release/bin/$test --gtest_brief=1
  done
}
structures() {
  cmake --preset release -DNANOVLLM_PYTHON=ON -DPython_EXECUTABLE="$PWD/build/python-env/bin/python" &&
    cmake --build --preset release --target nanovllm_python program_schemas_test &&
    NANOVLLM_ALL_SCHEMAS=1 build/release/bin/program_schemas_test --gtest_brief=1 &&
    NANOVLLM_GENERATIONS=10000 PYTHONPATH=build/release/python OMP_WAIT_POLICY=PASSIVE build/python-env/bin/python -m pytest -q -s \
      -p no:cacheprovider python/tests/test_structured_output.py
}
# 32 threads and 4 event loops on one engine for half of the time, and 1,000 engines made and dropped.
package() {
  NANOVLLM_TEST_SECONDS=$((seconds / 2)) NANOVLLM_TEST_ENGINES=1000 PYTHONPATH=build/release/python OMP_WAIT_POLICY=PASSIVE \
    build/python-env/bin/python -m pytest -q -s -p no:cacheprovider python/tests/test_async_llm.py python/tests/test_threads.py \
    -k 'threads_and_loops or engines_that_are_dropped'
}
fuzz() { scripts/fuzz.sh $((seconds / 10 + 1)) http requests chat_parser sampling_params; }

stage build build
show=/dev/stdout stage soak soak
stage models models
stage threads threads
if scripts/build-grammar.sh >/dev/null && scripts/python-env.sh; then
  stage structures structures
  stage package package
fi
if command -v clang++ >/dev/null; then stage fuzz fuzz; fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
