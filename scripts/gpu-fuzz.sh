#!/usr/bin/env bash
# The exactness fuzz on all GPUs of this machine, with random seeds:
#   scripts/gpu-fuzz.sh FOLDER [seconds, default 500] [processes a GPU, at most and by default 4]
# FOLDER holds load_fuzz_test and libnanovllm-cuda.so (build/cuda/bin). With two GPUs, 500 seconds are an hour of engine time: a tenth goes to
# models split over two GPUs, a process a pair; then each GPU runs processes of its own. Prints what was compared; fails where anything
# differed, and where a process was cut off (30 seconds after its time) before it had compared anything.
set -uo pipefail
folder=$(cd "$1" && pwd) seconds=${2:-500} processes=${3:-4}
mapfile -t gpus < <(tr ',' '\n' <<< "${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader)}" | grep .)
one=(qwen3_0_6b qwen3_8b qwen3_30b_a3b mistral_window qwen3_0_6b qwen3_32b qwen3_8b qwen2_heads_of_64)
two=(qwen3_0_6b_2_ranks qwen3_8b_2_ranks qwen3_30b_a3b_2_ranks)
logs=$(mktemp -d) begin=$SECONDS runs=0
trap 'rm -rf "$logs"' EXIT
# fuzz GPUS SHAPE SECONDS: in the background
fuzz() {
  local seed=$((RANDOM * 32768 + RANDOM)) log=$logs/$((runs++))
  (
    start=$(date +%s%N)
    CUDA_VISIBLE_DEVICES=$1 NANOVLLM_FUZZ_SEED=$seed NANOVLLM_FUZZ_SECONDS=$3 OMP_WAIT_POLICY=passive LD_LIBRARY_PATH=$folder:${LD_LIBRARY_PATH:-} \
      timeout -k 2 $(($3 + ${FUZZ_GRACE:-30})) "$folder/load_fuzz_test" --gtest_filter="*/$2" > "$log" 2>&1
    echo "END $2 gpu $1 seed $seed rc $? ms $((($(date +%s%N) - start) / 1000000))" >> "$log"
  ) &
}
if [ ${#gpus[@]} -gt 1 ]; then
  for shape in "${two[@]}"; do
    for ((i = 0; i + 1 < ${#gpus[@]}; i += 2)); do fuzz "${gpus[i]},${gpus[i + 1]}" "$shape" $((seconds / 30 + 1)); done
    wait
  done
fi
left=$((seconds - SECONDS + begin)) n=${FUZZ_FIRST:-$RANDOM}
for ((p = 0; p < processes; ++p)); do for gpu in "${gpus[@]}"; do fuzz "$gpu" "${one[n++ % ${#one[@]}]}" $left; done; done
wait
# Each process's last line of figures, summed by shape.
for log in "$logs"/*; do grep ' rounds, ' "$log" | tail -n 1; grep '^END' "$log"; done | awk '
  / rounds, / { s = $1; sub(",", "", s); ++n[s]; if (!(s in at)) { order[++shapes] = s; at[s] = 1 }
    rounds[s] += $4; requests[s] += $6; tokens[s] += $8; aborted[s] += $10; preempted[s] += $12; hits[s] += $14
    for (i = 1; i < NF; ++i) { if ($i ~ /^[0-9]+(\+[0-9]+)+$/) { k = split($i, d, "+"); for (j = 1; j <= k; ++j) decodes[s, j] += d[j] }
      if ($(i + 1) == "mixed,") mixed[s] += $i
      if ($(i + 1) == "in" && $(i + 2) == "two") lanes[s] += $i } }
  /^END/ { ms += $NF; if ($(NF - 2) == 124 || $(NF - 2) == 137) ++cut; else if ($(NF - 2) != 0) ++bad }
  END {
    for (o = 1; o <= shapes; ++o) { s = order[o]; all += rounds[s]; words += tokens[s]; gone += aborted[s]; back += preempted[s]
      rows = decodes[s, 1]; for (j = 2; (s, j) in decodes; ++j) rows = rows "+" decodes[s, j]
      printf "%s: %d processes, %d rounds, %d requests, %d tokens, %d aborted, %d preemptions, %d tokens from the cache; steps: %d mixed, %s decodes of up to 1/2/4/8/64/96/128/256 rows, %d in lanes\n", s, n[s], rounds[s], requests[s], tokens[s], aborted[s], preempted[s], hits[s], mixed[s], rows, lanes[s] }
    printf "total: %d rounds, %d tokens, %d aborted, %d preemptions, %.1f minutes of engine time; %d processes failed, %d cut off by the clock\n", all, words, gone, back, ms / 60000, bad, cut
  }'
failed=0
for log in "$logs"/*; do
  grep -q '^END.* rc 0 ' "$log" && continue
  grep -q '^END.* rc \(124\|137\) ' "$log" && grep -q ' rounds, ' "$log" && continue
  failed=1
  grep '^END' "$log"
  grep -m1 -A9 -E 'Failure|exception|rror' "$log" | cut -c1-240
  grep -m2 -E 'seed [0-9]+, round|arrival [0-9]+' "$log"
done
exit $failed
