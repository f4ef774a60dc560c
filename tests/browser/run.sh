#!/usr/bin/env bash
# run.sh NANOVLLM DIRECTORY: tests the page of the program NANOVLLM in Chromium. selenium is installed into DIRECTORY, where the
# screenshots go too. Exits with 77 where Chromium, its driver or selenium cannot be had.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
for tool in chromium chromedriver python3; do
  command -v "$tool" >/dev/null || { echo "skipped: $tool is not here (apt-get install chromium chromium-driver)"; exit 77; }
done
"$here/../../scripts/sdk-venv.sh" "$2" "$here/requirements.txt"
exec "$2/bin/python" -B "$here/page_test.py" "$1" "$2"
