#!/usr/bin/env bash
# Packs what the GPU tests need, built here, for a machine that has a GPU and a driver but not our build dependencies:
#   scripts/gpu-pack.sh [build directory, default build/cuda] [target folder, default build/gpu-carry]
# Copy the folder over and run scripts/gpu-test.sh there.
set -euo pipefail
build=${1:-build/cuda}
target=${2:-build/gpu-carry}
mkdir -p "$target"
rm -f "$target"/*
for file in "$build"/bin/libnanovllm-cuda.so "$build"/bin/ops_timing "$build"/bin/cuda_*_test "$build"/bin/parity_*_test; do
  [ -e "$file" ] && cp "$file" "$target"/ && strip "$target/$(basename "$file")"
done
# Shared libraries of the distribution, not those of the C and C++ runtime, of CUDA, or of the driver.
ldd "$target"/* 2>/dev/null | awk '$2 == "=>" && $3 ~ /^\// {print $3}' | sort -u |
  grep -v -E '/(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|libcu[a-zA-Z]*|libnv[a-zA-Z]*|ld-linux[^/]*)\.so' |
  while read -r library; do cp -L "$library" "$target"/; done
du -sh "$target" | cut -f1
