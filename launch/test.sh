#!/usr/bin/env bash
# Style, types and tests. Arguments go to pytest: ./launch/test.sh tests/server -k stream
set -euo pipefail
# shellcheck source=launch/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

install_oscar dev
cd "$root"
say "ruff";  "$venv/bin/ruff" check .
say "mypy";  "$venv/bin/mypy"
say "pytest"
# Two workers with one thread each: more threads only fight over the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$venv/bin/python" -m pytest --numprocesses "${OSCAR_TEST_WORKERS:-2}" "$@"
