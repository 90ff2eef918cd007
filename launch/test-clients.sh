#!/usr/bin/env bash
# Tests of the server with real clients. Those that need many packages get virtual environments of their own.
#
#   OSCAR_CLIENTS_VENV  lm-evaluation-harness and guidellm; default: .venv-clients in the checkout
#   OSCAR_VLLM_VENV     `vllm bench serve`; default: .venv-vllm, where launch/test-vllm.sh has made it, else skipped
#   OSCAR_SGLANG_VENV   SGLang's benchmark; default: .venv-sglang, where launch/test-sglang.sh has made it, else skipped
#   OSCAR_SCHEMATHESIS_EXAMPLES=250   schemathesis with thousands of cases
#
# Arguments go to pytest.
set -euo pipefail
# shellcheck source=launch/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
clients="${OSCAR_CLIENTS_VENV:-$root/.venv-clients}"
vllm="${OSCAR_VLLM_VENV:-$root/.venv-vllm}"

install_oscar dev
if [ ! -x "$clients/bin/python" ]; then
  say "creating $clients"
  "$(find_python)" -m venv "$clients"
fi
if [ ! -e "$clients/.oscar-clients" ]; then
  say "installing the clients (a few minutes)"
  "$clients/bin/python" -m pip install --quiet torch==2.13.0
  "$clients/bin/python" -m pip install --quiet --requirement "$root/tests/clients/requirements.txt"
  touch "$clients/.oscar-clients"
fi
export OSCAR_CLIENTS_VENV="$clients"
if [ -x "$vllm/bin/vllm" ]; then
  export OSCAR_VLLM_VENV="$vllm"
else
  unset OSCAR_VLLM_VENV
fi
sglang="${OSCAR_SGLANG_VENV:-$root/.venv-sglang}"
if [ -x "$sglang/bin/python" ]; then
  "$sglang/bin/python" -m pip install --quiet datasets  # what the benchmark needs beside the adapter's tests
  export OSCAR_SGLANG_VENV="$sglang"
else
  unset OSCAR_SGLANG_VENV
fi
cd "$root"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$venv/bin/python" -m pytest tests/clients -rs "$@"
