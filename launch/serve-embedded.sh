#!/usr/bin/env bash
# From a fresh clone to the embedded server with a model of your own; a GPU is used where there is one.
#
#   ./launch/serve-embedded.sh MODEL [options of `oscar serve`]   runs until Ctrl-C
#
# It listens on 127.0.0.1; a --host among the options takes precedence. `oscar models list` shows models that need no
# download from a hub; ./launch/quickstart.sh serves one of them.
set -euo pipefail
# shellcheck source=launch/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

need_model "$@"
install_oscar embedded
model="$1"
shift
say "starting the server (Ctrl-C stops it)"
exec "$venv/bin/oscar" serve "$model" --host 127.0.0.1 "$@"
