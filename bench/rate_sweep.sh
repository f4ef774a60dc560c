#!/usr/bin/env bash
# A server's latency by the rate of requests, measured by vLLM's client:
#   bench/rate_sweep.sh PROGRAM CLIENT MODEL [DEVICE [RATES [SECONDS [PROMPT_TOKENS [NEW_TOKENS]]]]]
# CLIENT is the program `vllm-rs` of the PyPI wheel `vllm`. MODEL needs config.json and a tokenizer; its weights are random. RATES are requests a
# second, each for SECONDS; `inf` is 512 requests at once.
set -euo pipefail
program=$1 client=$2 model=$3 device=${4:-cuda} rates=${5:-4 8 16 24 32 inf} seconds=${6:-12} prompt=${7:-1024} new=${8:-128}
log=$(mktemp)
trap 'kill -TERM $server; wait $server || cat "$log"; rm -f "$log"' EXIT
"$program" serve "$model" --device "$device" --load-format dummy --port 8123 --no-access-log --max-num-seqs 512 2>"$log" &
server=$!
until curl -sf http://127.0.0.1:8123/health >/dev/null; do kill -0 $server; sleep 0.1; done
ask() {  # rate, requests, seed
  "$client" bench serve --backend openai --port 8123 --tokenizer "$model" --random-input-len "$prompt" --random-output-len "$new" --ignore-eos \
    --temperature 0.6 --request-rate "$1" --num-prompts "$2" --seed "$3" --percentile-metrics ttft,tpot,e2el --metric-percentiles 50,99 --disable-tqdm 2>&1 |
    grep -E 'requests:|duration|hroughput|P50|P99|rror'
}
ask inf 16 1 >/dev/null
seed=2
for rate in $rates; do
  echo "== $rate requests/s"
  if [ "$rate" = inf ]; then ask inf 512 $seed; else ask "$rate" $((rate * seconds)) $seed; fi
  seed=$((seed + 1))
done
