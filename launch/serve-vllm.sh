#!/usr/bin/env bash
# From a fresh clone to vLLM 0.33.0 with a 2-bit KV cache, on Linux with an NVIDIA GPU.
#
#   ./launch/serve-vllm.sh MODEL [options of `vllm serve`]   runs until Ctrl-C
#
#   OSCAR_VLLM_VENV   environment with the engine; default: .venv-vllm in the checkout
#
# It listens on 127.0.0.1; a --host among the options takes precedence.
set -euo pipefail
# shellcheck source=launch/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
venv="${OSCAR_VLLM_VENV:-$root/.venv-vllm}"

need_model "$@"
need_gpu vLLM
install_engine vllm
model="$1"
shift
say "starting the server (Ctrl-C stops it)"
# Compilers that the engine starts are looked up on the path.
export PATH="$venv/bin:$PATH"
exec "$venv/bin/vllm" serve "$model" --kv-cache-dtype oscar_int2 --host 127.0.0.1 "$@"
