#!/usr/bin/env bash
# From a fresh clone to a server on a Mac's GPU: SmolLM2-135M over the OpenAI API, K and V in 4 bits (SRFT).
#
#   ./launch/serve-apple.sh [MODEL] [options of `oscar serve`]   runs until Ctrl-C
#
# `--kv-cache-dtype srft_k8v4` keeps K in 8 bits; what has been run where is on docs/apple.md.
set -euo pipefail
# shellcheck source=launch/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

if [ "$(uname -s)" != Darwin ] || [ "$(uname -m)" != arm64 ]; then
  die "this script is for Macs with Apple silicon, and this is $(uname -s) on $(uname -m). Use ./launch/quickstart.sh"
fi
install_oscar apple
model=smollm2
case "${1:-}" in
  "" | -*) ;;
  *) model="$1"; shift ;;
esac
say "starting the server (Ctrl-C stops it)"
exec "$venv/bin/oscar" serve "$model" --device mps --kv-cache-dtype srft_int4 "$@"
