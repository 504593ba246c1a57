#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serve a model on vLLM with KV in host memory and in a store that outlives the engine.
#
#   examples/serve_tiers.sh MODEL file  /data/kv                [vLLM's options]
#   examples/serve_tiers.sh MODEL redis redis://127.0.0.1:6379  [vLLM's options]
#   examples/serve_tiers.sh MODEL mooncake 127.0.0.1:50051      [vLLM's options]
#
# HOST_GIB (default 8) is host memory, in /dev/shm; STORE_GIB (default 100) bounds a store of files.
# A Redis server for KV alone: redis-server --save '' --maxmemory 8gb --maxmemory-policy allkeys-lru
set -euo pipefail

if [ $# -lt 3 ]; then
  sed -n '3,10p' "$0" >&2
  exit 2
fi
model=$1 store=$2 place=$3
shift 3

options=(--tiers --host-gib "${HOST_GIB:-8}" --tiers-store "$store" --tiers-path "$place")
if [ "$store" = file ]; then
  options+=(--tiers-gib "${STORE_GIB:-100}")
fi
# What is printed is quoted for a shell, with one option a line; notes go to standard error.
command=$(mimo flags --model "$model" "${options[@]}")
eval "words=($command)"
mimo doctor -- "${words[@]}" "$@"
exec "${words[@]}" --enable-prompt-tokens-details "$@"
