#!/usr/bin/env bash
# Trains with several processes on this machine: launch/processes.sh N [arguments of train ...]
# On a cluster, start one process per host with --coordinator HOST:PORT --processes N --process I,
# or --coordinator auto under SLURM, Open MPI and on Cloud TPU.
# Python is this checkout's own, `.venv`, where `make` made one; PYTHON=... names another.
set -euo pipefail
own=$(dirname "$0")/../.venv/bin/python
[ -x "$own" ] || own=python3
n=${1:?usage: launch/processes.sh N --config FILE --run FOLDER ...}
shift
port=$((20000 + RANDOM % 20000))
pids=()
trap : INT # a terminal's Ctrl-C reaches the processes by itself; they save and end
trap 'kill -TERM "${pids[@]}"' TERM
for ((i = 0; i < n; i++)); do
  "${PYTHON:-$own}" -m fedjax_flat train "$@" \
    --coordinator "localhost:$port" --processes "$n" --process "$i" &
  pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit "$status"
