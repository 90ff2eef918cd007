#!/usr/bin/env bash
# From a fresh clone to SGLang 0.5.23 with a 2-bit KV cache, on Linux with an NVIDIA GPU.
#
#   ./launch/serve-sglang.sh MODEL [options of `sglang serve`]   runs until Ctrl-C
#
#   OSCAR_SGLANG_VENV   environment with the engine; default: .venv-sglang in the checkout
#
# It listens on 127.0.0.1; a --host among the options takes precedence.
set -euo pipefail
# shellcheck source=launch/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
venv="${OSCAR_SGLANG_VENV:-$root/.venv-sglang}"

serve_engine sglang SGLang "$@"
