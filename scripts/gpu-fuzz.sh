#!/usr/bin/env bash
# The exactness fuzz on all GPUs of this machine, with random seeds:
#   scripts/gpu-fuzz.sh FOLDER [seconds, default 250] [processes a GPU, default 4]
# FOLDER holds load_fuzz_test and libnanovllm-cuda.so (build/cuda/bin). Where there are two GPUs, a fifth of the time goes to models
# split over two, a process a pair; the rest to models of one GPU. Prints what was compared, and fails where anything differed.
set -uo pipefail
folder=$(cd "$1" && pwd) seconds=${2:-250} processes=${3:-4}
read -ra gpus <<< "${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader | xargs)}" && gpus=(${gpus[*]//,/ })
one=(qwen3_0_6b qwen3_8b qwen3_30b_a3b qwen3_0_6b qwen3_32b mistral_window qwen3_8b qwen2_heads_of_64)
two=(qwen3_0_6b_2_ranks qwen3_30b_a3b_2_ranks)
logs=$(mktemp -d) begin=$SECONDS
trap 'rm -rf "$logs"' EXIT
# fuzz GPUS SHAPE SECONDS: in the background
fuzz() {
  local seed=$((RANDOM * 32768 + RANDOM)) log=$logs/$1.$2.$RANDOM
  (
    start=$(date +%s%N)
    CUDA_VISIBLE_DEVICES=$1 NANOVLLM_FUZZ_SEED=$seed NANOVLLM_FUZZ_SECONDS=$3 OMP_WAIT_POLICY=passive LD_LIBRARY_PATH=$folder:${LD_LIBRARY_PATH:-} \
      timeout -k 2 $(($3 + 60)) stdbuf -oL "$folder/load_fuzz_test" --gtest_filter="*/$2" > "$log" 2>&1
    echo "END gpu $1 shape $2 seed $seed rc $? ms $((($(date +%s%N) - start) / 1000000))" >> "$log"
  ) &
}
if [ ${#gpus[@]} -gt 1 ]; then
  for ((i = 0; i + 1 < ${#gpus[@]}; i += 2)); do fuzz "${gpus[i]},${gpus[i + 1]}" "${two[i / 2 % 2]}" $((seconds / 10)); done
  wait
  for ((i = 0; i + 1 < ${#gpus[@]}; i += 2)); do fuzz "${gpus[i]},${gpus[i + 1]}" "${two[(i / 2 + 1) % 2]}" $((seconds / 10)); done
  wait
fi
left=$((seconds - SECONDS + begin)) n=$RANDOM
for gpu in "${gpus[@]}"; do for ((p = 0; p < processes; ++p)); do fuzz "$gpu" "${one[n++ % ${#one[@]}]}" $left; done; done
wait
cat "$logs"/* | awk '/ rounds, / {sub(":", "", $1); done[$1]++; rounds[$1] += $2; requests[$1] += $4; tokens[$1] += $6; aborted[$1] += $8; preempted[$1] += $10; all += $2; many += $4}
  /^END/ {ms += $NF; if ($(NF - 2) == 124 || $(NF - 2) == 137) ++cut; else if ($(NF - 2) != 0) ++bad}
  END {
    for (s in rounds) printf "%s: %d processes, %d rounds, %d requests, %d tokens, %d aborted, %d preemptions\n", s, done[s], rounds[s], requests[s], tokens[s], aborted[s], preempted[s]
    printf "total: %d rounds, %d requests, %.1f minutes of engine time; %d processes failed, %d cut off by the clock\n", all, many, ms / 60000, bad, cut
  }'
failed=0
for log in "$logs"/*; do
  grep -q "^END.* rc \(0\|124\|137\) " "$log" && continue
  failed=1
  echo "-- $(grep ^END "$log")"
  grep -m1 -A9 -E 'Failure|exception' "$log" | cut -c1-240
  grep -m2 -E 'round [0-9]+:|request [0-9]+' "$log"
done
exit $failed
