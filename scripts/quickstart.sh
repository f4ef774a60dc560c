#!/usr/bin/env bash
# From a fresh clone to generated text: installs what the build needs, builds, and lets the bundled model speak.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/build.sh -DNANOVLLM_TESTS=OFF
program=build/release/bin/nanovllm

echo
echo "== The bundled model adds and subtracts (greedy: the same text every time) =="
"$program" generate models/demo --quiet --chat --max-tokens 64 \
  --prompt "What is 37 + 45?" --prompt "What is 81 - 29?" --prompt "Tom buys 12 apples and then 9 more. How many apples does Tom have?"
echo "== It knows how engines like this one work =="
"$program" generate models/demo --quiet --chat --max-tokens 128 --prompt "What is paged attention?"
echo
echo "== It tells a story, as it comes =="
"$program" generate models/demo --chat --max-tokens 256 --prompt "Tell me a story."
echo
cat <<TEXT
Next, with any model directory from Hugging Face in place of models/demo:
  nanovllm chat models/demo
  nanovllm generate models/demo --input examples/prompts.jsonl --output answers.jsonl
  nanovllm inspect models/demo          memory plan, and what would fit
  nanovllm bench latency models/demo    speed, beside the physical floor
  nanovllm doctor                       what this machine has, and what is missing
  scripts/test.sh                       the whole test suite
docs/cli.md describes every command. For good: cmake --install build/release --prefix ~/.local
This line puts the program on the PATH of this shell:
  export PATH="$PWD/build/release/bin:\$PATH"
TEXT
