#!/usr/bin/env bash
# Makes build/python-env, the virtual environment that the Python package is built and tested with, from python/requirements-test.txt:
# pinned versions, checked against their hashes. Exit status 3 where PyPI cannot be reached.
set -euo pipefail
cd "$(dirname "$0")/.."
env=build/python-env
wanted=$(sha256sum python/requirements-test.txt)
if [ -x $env/bin/python ] && [ "$(cat $env/requirements.sha256 2>/dev/null)" = "$wanted" ]; then exit 0; fi
# The extension needs Python's headers, and its tests an environment of their own.
python3 -c 'import ensurepip, os, sys, sysconfig
sys.exit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))' 2>/dev/null ||
  scripts/install-deps.sh python3 python3-dev python3-venv
rm -rf $env
if ! python3 -m venv $env || ! $env/bin/python -m pip install -q --require-hashes --only-binary :all: -r python/requirements-test.txt; then
  rm -rf $env
  echo "note: the Python package is neither built nor tested: its pinned packages cannot be had (PyPI, CPython 3.11 or 3.12)"
  exit 3
fi
echo "$wanted" >$env/requirements.sha256
