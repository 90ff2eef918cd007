#!/usr/bin/env bash
# From a fresh clone to a server that answers with SmolLM2-135M on a 2-bit KV cache.
#
#   ./launch/quickstart.sh [options of `oscar serve`]   runs until Ctrl-C
#   ./launch/quickstart.sh --check                      starts it, asks it a question, stops it; exits 0 when all is well
set -euo pipefail
# shellcheck source=launch/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

install_oscar embedded
if [ "${1:-}" = "--check" ]; then
  shift
  exec "$venv/bin/python" "$root/launch/check.py" "$@"
fi
say "starting the server (Ctrl-C stops it)"
exec "$venv/bin/oscar" serve smollm2 "$@"
