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

serve_engine vllm vLLM "$@"
