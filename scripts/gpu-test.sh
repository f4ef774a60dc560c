#!/usr/bin/env bash
# Runs every GPU test and prints a table; needs a GPU, a driver and cuBLASLt, and programs built here or packed by gpu-pack.sh:
#   scripts/gpu-test.sh [folder of the programs, default build/gpu-carry] [--sanitize] [--timing] [--only PATTERN] [--same-as FOLDER]
# A module built for older architectures only (-DNANOVLLM_CUDA_ARCHITECTURES=80) is tested on a newer GPU by the same programs;
# --same-as compares its answers with those of the programs in FOLDER, the GPU's own build, byte for byte.
# Logs go to $OUT where that is set, else to a temporary folder. The exit status is that of the tests.
set -uo pipefail
folder=build/gpu-carry sanitize=0 timing=0 only=. same_as=
while [ $# -gt 0 ]; do
  case $1 in
    --sanitize) sanitize=1 ;;
    --timing) timing=1 ;;
    --only) only=$2; shift ;;
    --same-as) same_as=$2; shift ;;
    *) folder=$1 ;;
  esac
  shift
done
logs=${OUT:-$(mktemp -d)}
cuda=${CUDA_HOME:-/usr/local/cuda}
export LD_LIBRARY_PATH="$folder:$cuda/lib64:${LD_LIBRARY_PATH:-}" PATH="$PATH:$cuda/bin"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader || { echo "no NVIDIA driver here"; exit 1; }
failed=0

report() {  # name, seconds, status, log
  local passed skipped
  passed=$(grep -c '^\[       OK \]' "$4"); skipped=$(grep -c '^\[  SKIPPED \] .*ms)' "$4")
  local lacking; lacking=$(grep -c 'this GPU has no such kernel' "$4")  # older GPUs, and modules built for them
  local bad; bad=$(grep -c '^\[  FAILED  \] .*ms)' "$4")
  printf '%-44s %4d passed %3d failed %3d skipped  exit %d  %4d s\n' "$1" "$passed" "$bad" "$skipped" "$3" "$2"
  if [ "$3" -ne 0 ] || [ "$skipped" -gt "$lacking" ]; then  # other skipped tests found no GPU or no module
    failed=1
    grep -E 'Failure|FAILED|--device cuda|error|Error|differ|times the bound|=====' "$4" | head -40
  fi
}

run() {  # name, command...
  local name=$1 begin=$SECONDS status=0
  shift
  echo "$name" | grep -q -E "$only" || return 0
  timeout "${LIMIT:-300}" "$@" >"$logs/$name.log" 2>&1 || status=$?
  report "$name" $((SECONDS - begin)) "$status" "$logs/$name.log"
  grep -E '^  (gemm|attention) .* differ$' "$logs/$name.log"
}

for program in "$folder"/cuda_*_test; do
  run "$(basename "$program")" "$program"  # ranks need a GPU each: where there is one, their tests skip
done
for program in "$folder"/parity_*_test; do
  [ -e "$program" ] && run "$(basename "$program")" "$program" --gtest_filter='*cuda*:*Cuda*'
done
for program in "$folder"/{huggingface,adjusted_answers,exactness,quantised}_test; do  # they read tests/data where they were built
  [ -e "$program" ] && run "$(basename "$program")" "$program" --gtest_filter='*Cuda*'
done
if [ $sanitize = 1 ]; then
  # The tools slow kernels down up to a hundredfold: without the tests that are large or many.
  for program in "$folder"/parity_*_test; do
    case $program in *large*) continue ;; esac
    run "$(basename "$program").memcheck" compute-sanitizer --tool memcheck --error-exitcode 9 --print-limit 5 \
      "$program" --gtest_filter='*cuda*'
    run "$(basename "$program").racecheck" compute-sanitizer --tool racecheck --error-exitcode 9 --print-limit 5 \
      "$program" --gtest_filter='*cuda*:-*EveryNumberOfRows*:*Frequencies*:*Large*'
    run "$(basename "$program").initcheck" compute-sanitizer --tool initcheck --error-exitcode 9 --print-limit 5 \
      "$program" --gtest_filter='*cuda*:-*EveryNumberOfRows*:*Frequencies*:*Large*'
  done
  grep -H -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$logs"/*check.log | sed 's|.*/||'
fi
# The answers of a mixture and a dense model of random weights, without the times that requests took.
answers() {  # folder of the programs, model's folder, sequences at once
  LD_LIBRARY_PATH="$1:$LD_LIBRARY_PATH" timeout 200 "$1/nanovllm" generate -q -m "$2" --load-format dummy --skip-tokenizer-init \
    --device cuda --gpu-memory-utilization 0.4 --max-num-seqs "$3" -i "$logs/requests.jsonl" -o - | sed 's/, *"metrics":.*//' | sort
}
if [ -n "$same_as" ]; then
  awk 'BEGIN {
    for (r = 0; r < 24; ++r) {
      printf "{\"id\": \"%d\", \"sampling_params\": {\"max_tokens\": %d, \"ignore_eos\": true, \"logprobs\": 2, ", r, 8 + r
      printf "\"seed\": %d, \"temperature\": %d}, \"prompt_token_ids\": [", r, r % 2
      for (i = 0; i <= 2 * r * r; ++i) printf "%s%d", i ? ", " : "", (1000 + 701 * r + 331 * i) % 150000
      print "]}"
    }
  }' >"$logs/requests.jsonl"
  for model in qwen3-30b-a3b qwen3-0.6b; do
    mkdir -p "$logs/$model"
    sed 's/"num_hidden_layers": [0-9]*/"num_hidden_layers": 4/' bench/configs/$model/config.json >"$logs/$model/config.json"
    answers "$same_as" "$logs/$model" 24 >"$logs/$model.expected"
    for sequences in 24 3; do
      answers "$folder" "$logs/$model" $sequences >"$logs/$model.$sequences"
      if [ "$(wc -l <"$logs/$model.expected")" = 24 ] && cmp -s "$logs/$model.expected" "$logs/$model.$sequences"; then
        echo "$model, $sequences sequences at once: the bytes of $same_as"
      else
        echo "$model, $sequences sequences at once: not the bytes of $same_as"
        failed=1
      fi
    done
  done
fi
if [ $timing = 1 ]; then timeout 200 "$folder/ops_timing" | tee "$logs/timing.txt"; fi
exit $failed
