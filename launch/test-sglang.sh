#!/usr/bin/env bash
# Tests of the SGLang adapter without a GPU: SGLang's wheel beside a CPU build of torch, in a virtual environment of
# its own; the kernels run in the Triton interpreter.
#
#   OSCAR_SGLANG_TEST_VENV   where that environment lies; default: .venv-sglang-test in the checkout
#
# Arguments go to pytest.
set -euo pipefail
# shellcheck source=launch/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
venv="${OSCAR_SGLANG_TEST_VENV:-$root/.venv-sglang-test}"

make_environment
pip() { "$venv/bin/python" -m pip install --quiet --prefer-binary "$@"; }
if [ ! -e "$venv/.oscar-sglang" ]; then
  say "installing SGLang 0.5.23 without its GPU requirements (a few minutes)"
  pip torch==2.13.0 triton==3.6.0 transformers==5.19.0 tokenizers==0.23.2 numpy pytest pytest-timeout hypothesis
  pip --no-deps sglang==0.5.23
  pip --requirement "$root/tests/sglang/requirements.txt"
  pip --no-deps --editable "$root"
  touch "$venv/.oscar-sglang"
fi
cd "$root"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TRITON_INTERPRET=1
"$venv/bin/python" -m pytest tests/sglang "$@"
