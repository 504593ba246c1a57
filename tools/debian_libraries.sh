#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Lay libraries of Debian (or Ubuntu) into the folder $1, without root and without installing them:
# those that the Mooncake store is linked with and does not bring.
set -euo pipefail
target=$(realpath "$1")
packages=(libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
if ! apt-get download "${packages[@]}"; then
  # This machine's lists of packages are missing or old: have some of our own.
  mkdir -p lists/partial cache/archives/partial
  own=(-o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache")
  apt-get "${own[@]}" update
  apt-get "${own[@]}" download "${packages[@]}"
fi
for package in *.deb; do
  dpkg-deb -x "$package" files
done
find files \( -type f -o -type l \) -path '*/lib/*-linux-gnu*/lib*.so.*' -not -path '*/libibverbs/*' \
  -exec cp -P -t "$target" {} +
