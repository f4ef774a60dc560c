#!/usr/bin/env bash
# scripts/sdk-venv.sh DIRECTORY [REQUIREMENTS]: a virtual environment with the SDKs of tests/sdk, or what REQUIREMENTS names, in the versions
# and with the hashes of its requirements.txt. Does nothing where it is there already. Exit 77, with the reason, where it cannot be made: no CPython 3.11 on x86-64, or
# no PyPI.
set -euo pipefail
requirements=${2:-$(cd "$(dirname "$0")/.." && pwd)/tests/sdk/requirements.txt}
venv=$1
if cmp -s "$requirements" "$venv/requirements.txt"; then exit 0; fi
if ! python3 -c 'import platform, sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11) or platform.machine() != "x86_64")'; then
  echo "skipped: its packages are pinned for CPython 3.11 with venv on x86-64"
  exit 77
fi
rm -rf "$venv"
python3 -m venv "$venv"
if ! "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes -r "$requirements" 2>"$venv/pip.log"; then
  tail -n 3 "$venv/pip.log"
  if grep -q 'DO NOT MATCH' "$venv/pip.log"; then exit 1; fi
  echo "skipped: PyPI cannot be reached"
  exit 77
fi
cp "$requirements" "$venv/requirements.txt"
