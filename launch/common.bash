# shellcheck shell=bash
# Sourced by the scripts beside it: --dry-run, the program, and what a SLURM job does at its end.
dry=
if [ "${1:-}" = --dry-run ]; then dry=yes; shift; fi

run() { # a command, or in a dry run what it would be
  if [ "$dry" ]; then printf '%q ' "$@"; echo; else "$@"; fi
}

# This checkout's own python, where `make` made one; PYTHON=... names another.
python=${PYTHON:-.venv/bin/python}
[ "${PYTHON:-}" ] || [ -x "$python" ] || python=python3

# slurm_job [options of srun] -- arguments of train
# SLURM sends the signal of --signal to what srun started, not to the script. Training saves and
# ends with 128 + 10 for SIGUSR1, the time being over: the job goes back into the queue. At SIGTERM,
# it was pre-empted (then SLURM itself requeues it) or cancelled.
slurm_job() {
  local options=()
  while [ "$1" != -- ]; do options+=("$1"); shift; done
  shift
  trap : TERM USR1 # in the script; what srun starts has its own ways
  local status=0
  run srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "${options[@]}" \
    "$python" -m fedjax_flat train "$@" --quiet || status=$?
  if [ "$status" = 138 ]; then run scontrol requeue "${SLURM_JOB_ID:?}"; fi
  return "$status"
}
