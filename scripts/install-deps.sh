#!/usr/bin/env bash
# Installs the distribution's packages that the build needs and that are missing, and those given as arguments; nothing else is touched.
# For Debian 12 and Ubuntu 22.04 and 24.04, as root or with sudo. Where all are there it asks for nothing.
set -euo pipefail

packages=(cmake ninja-build curl ca-certificates libfmt-dev nlohmann-json3-dev libcli11-dev libdnnl-dev libpcre2-dev
          libedit-dev libboost-dev libssl-dev libjs-marked libjs-highlight.js
          libutf8proc-dev libxxhash-dev libzmq3-dev libgtest-dev "$@")

id=unknown version=
if [ -r /etc/os-release ]; then
  id=$(. /etc/os-release && echo "${ID:-unknown}")
  version=$(. /etc/os-release && echo "${VERSION_ID:-}")
fi
case "$id $version" in
  "ubuntu 22.04") packages+=(g++-12) ;;  # its own default is g++ 11
  "debian 12" | "ubuntu 24.04") packages+=(g++) ;;
  *)
    if ! command -v apt-get >/dev/null; then
      {
        echo "error: this script knows Debian 12 and Ubuntu 22.04 and 24.04; this is $id $version."
        echo "Install a C++20 compiler (g++ 12 or later), CMake 3.22 or later, Ninja, and the development packages of fmt,"
        echo "nlohmann-json, CLI11, oneDNN, PCRE2, libedit, utf8proc, xxHash and GoogleTest; then build with"
        echo "  cmake --preset release && cmake --build --preset release"
      } >&2
      exit 1
    fi
    packages+=(g++)
    ;;
esac

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$status" = installed ] || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
  echo "All packages that the build needs are installed."
  exit 0
fi

sudo=()
if [ "$(id -u)" -ne 0 ]; then
  if ! command -v sudo >/dev/null; then
    echo "error: these packages are missing, and installing them needs root: ${missing[*]}" >&2
    exit 1
  fi
  sudo=(sudo)
fi
echo "Installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
"${sudo[@]}" apt-get update -q
"${sudo[@]}" apt-get install -q -y --no-install-recommends "${missing[@]}"
