#!/usr/bin/env bash
# run.sh VENV TEST PROGRAM MODEL: one test program of this folder; 77 (skipped) where there is no virtual environment.
if ! [ -f "$1/requirements.txt" ]; then
  echo "skipped: $1 could not be made (see Sdk.Venv)"
  exit 77
fi
exec "$1/bin/python" -B "$2" "$3" "$4"
