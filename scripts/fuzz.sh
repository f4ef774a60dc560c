#!/usr/bin/env bash
# scripts/fuzz.sh [seconds] [target...]: builds the libFuzzer programs with ASan and UBSan and runs each of them that long
# (20 s unless told), one on each core. Inputs found beyond the seeds stay in build/fuzz/corpus. Exit 1 if any input
# crashed, hung or took too much memory; the input lies in build/fuzz/findings and a fixed one becomes a seed in
# tests/fuzz/corpus.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-20}
shift || true

cmake --preset fuzz >/dev/null
cmake --build --preset fuzz --target fuzzers

targets=("${@#fuzz_}")  # also by the names of their files
if [ ${#targets[@]} -eq 0 ]; then
  for source in tests/fuzz/fuzz_*.cpp; do
    name=${source##*/fuzz_}
    targets+=("${name%.cpp}")
  done
fi

# Targets that need files write them to memory, and ASan keeps less freed memory so that the limit means the program's own.
TMPDIR=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
export TMPDIR ASAN_OPTIONS=quarantine_size_mb=16
trap 'rm -rf "$TMPDIR"' EXIT

fuzz() {  # target: exit 1 and the end of its log if an input failed
  local target=$1 failed=
  local grown=build/fuzz/corpus/$target seeds=tests/fuzz/corpus/$target log=build/fuzz/$target.log
  mkdir -p "$grown"
  local args=(-max_total_time="$seconds" -timeout=10 -rss_limit_mb=512 -malloc_limit_mb=64 -print_final_stats=1
              -artifact_prefix=build/fuzz/findings/"$target"- "$grown")
  [ -d "$seeds" ] && args+=("$seeds")
  [ -f tests/fuzz/"$target".dict ] && args+=(-dict=tests/fuzz/"$target".dict)
  "build/fuzz/bin/fuzz_$target" "${args[@]}" >"$log" 2>&1 || failed=1
  printf '%-16s %12s executions  %s\n' "$target" "$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")" "${failed:+FAILED}"
  [ -z "$failed" ] || { tail -n 60 "$log"; return 1; }
}
export seconds
export -f fuzz

mkdir -p build/fuzz/findings
if ! printf '%s\n' "${targets[@]}" | xargs -P"$(nproc)" -n1 bash -c 'fuzz "$0"'; then
  echo "fuzzing failed: see build/fuzz/findings" >&2
  exit 1
fi
