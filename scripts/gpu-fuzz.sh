#!/usr/bin/env bash
# The exactness fuzz on all GPUs of this machine, with random seeds:
#   scripts/gpu-fuzz.sh FOLDER [seconds, default 500] [processes a GPU, at most and by default 4]
# FOLDER holds load_fuzz_test and libnanovllm-cuda.so (build/cuda/bin). With two GPUs, 500 seconds are an hour of engine time: a tenth goes to
# models split over two GPUs, a process a pair; then each GPU runs processes of its own. Prints what was compared; fails where anything
# differed, and where a process had to be ended FUZZ_GRACE (45) seconds after its time (rc 124).
set -uo pipefail
folder=$(cd "$1" && pwd) seconds=${2:-500} processes=${3:-4}
mapfile -t gpus < <(tr ',' '\n' <<< "${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader)}" | grep .)
one=(qwen3_0_6b qwen3_8b qwen3_30b_a3b mistral_window qwen3_0_6b qwen3_32b qwen3_8b qwen2_heads_of_64 fp8_cache fp8_cache_heads_of_64
  fp8_blocks int4 fp8_experts int4_experts fp8_rows int8 int8_experts)
two=(qwen3_0_6b_2_ranks qwen3_8b_2_ranks qwen3_30b_a3b_2_ranks fp8_cache_2_ranks fp8_blocks_2_ranks fp8_experts_2_ranks int4_experts_2_ranks int4_2_ranks)
logs=$(mktemp -d) begin=$SECONDS runs=0
trap 'rm -rf "$logs"' EXIT
# fuzz GPUS SHAPE SECONDS: in the background
fuzz() {
  local seed=$((RANDOM * 32768 + RANDOM)) log=$logs/$((runs++))
  (
    start=$(date +%s%N)
    CUDA_VISIBLE_DEVICES=$1 NANOVLLM_FUZZ_SEED=$seed NANOVLLM_FUZZ_SECONDS=$3 OMP_WAIT_POLICY=passive LD_LIBRARY_PATH=$folder:${LD_LIBRARY_PATH:-} \
      timeout -k 2 $(($3 + ${FUZZ_GRACE:-45})) "$folder/load_fuzz_test" --gtest_filter="*/$2" > "$log" 2>&1
    echo "END $2 gpu $1 seed $seed rc $? ms $((($(date +%s%N) - start) / 1000000))" >> "$log"
  ) &
}
if [ ${#gpus[@]} -gt 1 ]; then
  for shape in "${two[@]}"; do
    for ((i = 0; i + 1 < ${#gpus[@]}; i += 2)); do fuzz "${gpus[i]},${gpus[i + 1]}" "$shape" $((seconds / 30 + 1)); done
    wait
  done
fi
left=$((seconds - SECONDS + begin)) n=$RANDOM
for ((p = 0; p < processes; ++p)); do for gpu in "${gpus[@]}"; do fuzz "$gpu" "${one[n++ % ${#one[@]}]}" $left; done; done
wait
# Each process's last line of figures, summed by shape and over all: a figure is a number, or several with + between them.
for log in "$logs"/*; do grep ' rounds, ' "$log" | tail -n 1; done | awk '
  { shape = $1; sub(",", "", shape); all["in all"]; all[shape]; fields = NF
    for (i = 4; i <= NF; ++i) {
      word[i] = $i
      if ($i !~ /^[0-9.+]+$/) continue
      parts[i] = split($i, number, "+")
      for (j = 1; j <= parts[i]; ++j) { sum[shape, i, j] += number[j]; sum["in all", i, j] += number[j] } } }
  END { for (shape in all) {
    line = shape ":"
    for (i = 4; i <= fields; ++i) {
      figure = word[i]
      if (parts[i]) { figure = sum[shape, i, 1]; for (j = 2; j <= parts[i]; ++j) figure = figure "+" sum[shape, i, j] }
      line = line " " figure }
    print line } }' | sort
grep -h '^END' "$logs"/* | awk '{ ms += $NF; failed += $(NF - 2) != 0 } END { printf "%d processes, %.1f minutes of engine time, %d failed\n", NR, ms / 60000, failed }'
failed=0
for log in "$logs"/*; do
  grep -q '^END.* rc 0 ' "$log" && continue
  failed=1
  grep '^END' "$log"
  grep -m1 -A11 -E 'Failure|exception|rror' "$log" | cut -c1-240
done
exit $failed
