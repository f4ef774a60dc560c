#!/usr/bin/env bash
# scripts/fetch-schema-suite.sh: the JSON-Schema-Test-Suite, for tests/constrain, in build/json-schema-suite. It is part of the source
# release of Python's jsonschema, with a pinned version and hash. Exit 1, with a note, where it cannot be had: its test is skipped.
set -euo pipefail
cd "$(dirname "$0")/.."

version=4.26.0
sha256=0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326
url=https://files.pythonhosted.org/packages/b3/fc/e067678238fa451312d4c62bf6e6cf5ec56375422aee02f9cb5f909b3047/jsonschema-$version.tar.gz
folder=build/json-schema-suite
if [ "$(cat "$folder/version" 2>/dev/null)" = "$version" ]; then exit 0; fi

skip() {
  echo "note: $1: the JSON-Schema-Test-Suite is not run" >&2
  exit 1
}
rm -rf "$folder"
mkdir -p "$folder"
archive=$folder/jsonschema.tar.gz
if ! curl -fsSL --retry 2 --connect-timeout 10 --max-time 120 -o "$archive" "$url"; then skip "jsonschema's source release cannot be fetched from PyPI"; fi
echo "$sha256  $archive" | sha256sum --check --quiet || skip "jsonschema's source release has another hash than expected"
tar -xzf "$archive" -C "$folder" --strip-components=2 "jsonschema-$version/json"
rm "$archive"
echo "$version" >"$folder/version"
