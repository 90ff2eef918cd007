# shellcheck shell=bash
# Sourced by the other scripts: a virtual environment with this checkout installed. Works in bash 3.2 (macOS).
#
#   PYTHON      interpreter to build the environment with; default: the first of python3.11, 3.12, 3.13, python3 that fits
#   OSCAR_VENV  where the environment lies; default: .venv in the checkout

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${OSCAR_VENV:-$root/.venv}"

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  die "no Python 3.11 or newer found (tried: ${PYTHON:-python3.11 python3.12 python3.13 python3})." \
    "Install one, or name it: PYTHON=/path/to/python3.12 $0"
}

# make_environment: the virtual environment $venv, where there is none yet.
make_environment() {
  local python
  if [ ! -x "$venv/bin/python" ]; then
    python="$(find_python)"
    say "creating $venv with $("$python" --version)"
    "$python" -m venv "$venv" || die "could not create $venv. On Debian and Ubuntu: apt-get install python3-venv"
  fi
}

# install_oscar EXTRA: the checkout, editable, with the extra's requirements at the versions of constraints.txt.
install_oscar() {
  local extra="$1" stamp="$venv/.oscar-$1" wanted
  make_environment
  wanted="$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum) $root"
  if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    return
  fi
  say "installing oscar-serving[$extra] (a few minutes the first time)"
  # torch first and pinned: every later requirement then finds it there.
  "$venv/bin/python" -m pip install --quiet --constraint "$root/constraints.txt" torch
  "$venv/bin/python" -m pip install --quiet --constraint "$root/constraints.txt" --editable "${root}[$extra]"
  printf '%s\n' "$wanted" > "$stamp"
}

# install_engine EXTRA: the checkout, editable, with the engine that the extra names. Not at the versions of
# constraints.txt: an engine pins the torch that it was compiled against, another one each.
install_engine() {
  local extra="$1" stamp="$venv/.oscar-$1" wanted
  make_environment
  wanted="$(cksum < "$root/pyproject.toml") $root"
  if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    return
  fi
  say "installing oscar-serving[$extra] (gigabytes the first time)"
  "$venv/bin/python" -m pip install --quiet --editable "${root}[$extra]"
  printf '%s\n' "$wanted" > "$stamp"
}

# need_model ARGUMENTS: the first one names a model.
need_model() {
  case "${1:-}" in
    "" | -*) die "name a model first, then options: $0 MODEL [options]" ;;
  esac
}

# need_gpu ENGINE: this machine has an NVIDIA GPU and the driver for it.
need_gpu() {
  if ! nvidia-smi --list-gpus >/dev/null 2>&1; then
    die "no NVIDIA GPU here (nvidia-smi finds none), and $1 with an OSCAR cache needs one. Use ./launch/serve-embedded.sh"
  fi
}

# serve_engine COMMAND NAME MODEL [OPTIONS]: install the engine in $venv and run `COMMAND serve MODEL` with a 2-bit cache.
serve_engine() {
  local command="$1" name="$2" model
  shift 2
  need_model "$@"
  need_gpu "$name"
  install_engine "$command"
  model="$1"
  shift
  say "starting the server (Ctrl-C stops it)"
  # Compilers that the engine starts are looked up on the path.
  export PATH="$venv/bin:$PATH"
  exec "$venv/bin/$command" serve "$model" --kv-cache-dtype oscar_int2 --host 127.0.0.1 "$@"
}
