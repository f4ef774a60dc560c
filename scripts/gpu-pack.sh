#!/usr/bin/env bash
# Packs what the GPU tests need, built here, for a machine that has a GPU and a driver but not our build dependencies:
#   scripts/gpu-pack.sh [build directory, default build/cuda] [archive, default build/gpu-carry.tar.gz]
# There: mkdir g && tar xzf gpu-carry.tar.gz -C g && scripts/gpu-test.sh g
set -euo pipefail
build=${1:-build/cuda}
archive=${2:-build/gpu-carry.tar.gz}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for file in "$build"/bin/libnanovllm-cuda.so "$build"/bin/ops_timing "$build"/bin/cuda_*_test "$build"/bin/parity_*_test \
  "$build"/bin/{huggingface,exactness,adjusted_answers,quantised,load_fuzz,parallel}_test "$build"/bin/nanovllm \
  "$build"/bin/{libnanovllm-grammar.so,nanovllm-grammar-compiler}; do
  [ -e "$file" ] && cp "$file" "$folder"/ && strip "$folder/$(basename "$file")"
done
# Shared libraries of the distribution, not those of the C and C++ runtime, of CUDA, or of the driver.
ldd "$folder"/* 2>/dev/null | awk '$2 == "=>" && $3 ~ /^\// {print $3}' | sort -u |
  grep -v -E '/(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|libcu[a-zA-Z]*|libnv[a-zA-Z]*|ld-linux[^/]*)\.so' |
  while read -r library; do cp -L "$library" "$folder"/; done
tar czf "$archive" -C "$folder" .
du -h "$archive"
