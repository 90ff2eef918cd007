#!/usr/bin/env bash
# Tests of the vLLM adapter without a GPU: vLLM's wheel beside a CPU build of torch, in a virtual environment of its own.
#
#   OSCAR_VLLM_TEST_VENV   where that environment lies; default: .venv-vllm-test in the checkout
#
# Arguments go to pytest.
set -euo pipefail
# shellcheck source=launch/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
venv="${OSCAR_VLLM_TEST_VENV:-$root/.venv-vllm-test}"

make_environment
pip() { "$venv/bin/python" -m pip install --quiet --prefer-binary "$@"; }
if [ ! -e "$venv/.oscar-vllm" ]; then
  say "installing vLLM 0.33.0 without its GPU requirements (a few minutes)"
  pip torch==2.13.0 triton==3.6.0 "transformers>=5.17,<5.21" numpy pytest pytest-timeout pytest-xdist hypothesis
  pip --no-deps --only-binary :all: vllm==0.33.0
  # Its pure requirements: those that neither pin another torch nor need CUDA.
  "$venv/bin/python" - > "$venv/requirements.txt" <<'PY'
import importlib.metadata
import re

gpu = ("torch", "triton", "nvidia", "flashinfer", "tilelang", "tokenspeed", "humming", "quack", "ray", "numba", "cuda",
       "fastsafetensors", "instanttensor", "apache-tvm", "opencv", "xgrammar", "outlines", "llguidance")
for requirement in importlib.metadata.requires("vllm") or []:
    name = re.split(r"[ ;<>=!\[~]", requirement)[0].lower()
    if "extra ==" not in requirement and not name.startswith(gpu):
        print(requirement)
PY
  pip --requirement "$venv/requirements.txt" xgrammar llguidance
  pip --no-deps --editable "$root"
  touch "$venv/.oscar-vllm"
fi
cd "$root"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" VLLM_TARGET_DEVICE=cpu VLLM_LOGGING_LEVEL="${VLLM_LOGGING_LEVEL:-WARNING}"
say "block manager, layer and engine"
"$venv/bin/python" -m pytest tests/vllm "$@"
say "kernels under the Triton interpreter"
TRITON_INTERPRET=1 "$venv/bin/python" -m pytest tests/vllm/test_layer.py -k kernels "$@"
