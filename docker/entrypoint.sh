#!/bin/sh
# Entry point of the images: takes the API key from a file or the environment, then becomes the server.
#
#   entrypoint.sh vllm|sglang|embedded MODEL [options of the server]
#
#   OSCAR_API_KEY_FILE   file with the key: a mounted secret
#   OSCAR_API_KEY        the key itself, where no file is given
set -eu

die() { printf 'error: %s\n' "$*" >&2; exit 1; }

engine="$1"
shift
case "${1:-}" in
  "" | -*) die "name a model first: a folder in the container (such as /models/my-model) or a name, then options" ;;
esac
model="$1"
shift

if [ -n "${OSCAR_API_KEY_FILE:-}" ]; then
  [ -r "$OSCAR_API_KEY_FILE" ] ||
    die "cannot read the API key in $OSCAR_API_KEY_FILE as user $(id -u): mount it, and let group $(id -g) read it"
  OSCAR_API_KEY="$(cat "$OSCAR_API_KEY_FILE")"
fi
[ -n "${OSCAR_API_KEY:-}" ] ||
  die "no API key: the server listens on all addresses of its network. Mount a file and set OSCAR_API_KEY_FILE," \
    "or set OSCAR_API_KEY"

# The key never goes on a command line: every user of the machine could list it there.
case "$engine" in
  embedded)
    export OSCAR_API_KEY
    exec oscar serve "$model" --host 0.0.0.0 --port 8000 "$@"
    ;;
  vllm)
    export VLLM_API_KEY="$OSCAR_API_KEY"
    # Without the timeout vLLM aborts what runs at SIGTERM.
    exec vllm serve "$model" --host 0.0.0.0 --port 8000 --kv-cache-dtype oscar_int2 --shutdown-timeout 60 "$@"
    ;;
  sglang)
    options="$(umask 077 && mktemp)"
    mv "$options" "$options.yaml" # SGLang reads options from *.yaml alone
    (umask 077 && printf "api-key: '%s'\n" "$(printf %s "$OSCAR_API_KEY" | sed "s/'/''/g")" > "$options.yaml")
    exec sglang serve "$model" --config "$options.yaml" \
      --host 0.0.0.0 --port 8000 --kv-cache-dtype oscar_int2 --enable-metrics "$@"
    ;;
  *) die "unknown engine $engine" ;;
esac
