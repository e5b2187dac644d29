#!/usr/bin/env bash
# Trains with several processes on this machine:
# launch/processes.sh [--dry-run] N [arguments of train ...]
# On a cluster: the other scripts here, and docs/launch.md.
# Python is this checkout's own, `.venv`, where `make` made one; PYTHON=... names another.
set -euo pipefail
own=$(dirname "$0")/../.venv/bin/python
[ -x "$own" ] || own=python3
dry=
if [ "${1:-}" = --dry-run ]; then dry="echo"; shift; fi
n=${1:?usage: launch/processes.sh [--dry-run] N --config FILE --run FOLDER ...}
shift
port=$((20000 + RANDOM % 20000))
pids=()
trap : INT # a terminal's Ctrl-C reaches the processes by itself; they save and end
trap 'kill -TERM "${pids[@]}"' TERM
trap 'kill -USR1 "${pids[@]}"' USR1
for ((i = 0; i < n; i++)); do
  $dry "${PYTHON:-$own}" -m fedjax_flat train "$@" \
    --coordinator "localhost:$port" --processes "$n" --process "$i" &
  pids+=($!)
done
status=0
for pid in "${pids[@]}"; do
  wait "$pid" || status=$?
  while kill -0 "$pid" 2> /dev/null; do wait "$pid" || status=$?; done # a trap ended the first
done
exit "$status"
