#!/usr/bin/env bash
# A Cloud TPU by a queued resource: launch/cloud_tpu.sh [--dry-run] STEP..., where STEP is create,
# install, run, log, fetch, delete, or all for these in turn but log. Edit three lines;
# docs/launch.md has the rest. Needs gcloud, logged in, and its project set.
set -euo pipefail
cd "$(dirname "$0")/.."
name=fedjax-flat zone=us-west4-a
kind=(--accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite --spot)
folder=runs/cloud_tpu train=(--config configs/digits_fedavg.py)

source launch/common.bash
tpus=(gcloud compute tpus)
parent=$(dirname "$folder") every=600
on_all=("${tpus[@]}" tpu-vm ssh "$name" --zone="$zone" --worker=all --command)
copy=("${tpus[@]}" tpu-vm scp --recurse --zone="$zone")

create() { # a Spot TPU may take hours to come, and go at any time
  run "${tpus[@]}" queued-resources create "$name" --node-id="$name" --zone="$zone" "${kind[@]}"
  local look=("${tpus[@]}" queued-resources describe "$name" --zone="$zone"
    "--format=value(state.state)") state=
  if [ "$dry" ]; then run "${look[@]}"; echo "# until it is ACTIVE"; return; fi
  until [ "$state" = ACTIVE ]; do
    state=$("${look[@]}")
    case $state in
      FAILED | SUSPENDED | SUSPENDING)
        echo "$name is $state: see ${tpus[*]} queued-resources describe $name --zone=$zone" >&2
        return 1 ;;
    esac
    sleep 30
  done
}

install() { # what is committed here, on every host; the run, if it has begun, on worker 0
  local archive=/tmp/fedjax_flat.tar.gz
  run git archive --format=tar.gz --output="$archive" HEAD
  run "${copy[@]}" "$archive" "$name:" --worker=all
  run "${on_all[@]}" "set -e; mkdir -p fedjax_flat/${parent@Q}; cd fedjax_flat
tar xzf ../fedjax_flat.tar.gz
python3.11 -m venv .venv || {
  sudo apt-get update -qq; sudo apt-get install -qq -y python3.11-venv; python3.11 -m venv .venv; }
.venv/bin/pip install --quiet --constraint constraints.txt '.[tpu]'"
  if [ -d "$folder" ]; then run "${copy[@]}" "$folder" "$name:fedjax_flat/$parent" --worker=0; fi
}

run_all() { # fetches now and then, as the disk of a TPU that is pre-empted goes with it
  local command=("${on_all[@]}" "cd fedjax_flat && nohup .venv/bin/python -m fedjax_flat train \
${train[*]@Q} --run ${folder@Q} --coordinator auto --timeout 300 --quiet > train.log 2>&1")
  if [ "$dry" ]; then run "${command[@]}"; echo "# and every $every s:"; fetch; return; fi
  while sleep "$every" > /dev/null; do fetch || true; done &
  local keeper=$! status=0
  "${command[@]}" || status=$?
  kill "$keeper"
  return "$status"
}

log() { run "${on_all[@]}" "tail -n 20 fedjax_flat/train.log"; }

fetch() { # process 0 writes the run folder; it is worker 0
  run mkdir -p "$parent"
  run "${copy[@]}" "$name:fedjax_flat/$folder" "$parent" --worker=0
}

delete() { run "${tpus[@]}" queued-resources delete "$name" --zone="$zone" --force --quiet; }

if [ $# = 0 ]; then
  echo "usage: $0 [--dry-run] create|install|run|log|fetch|delete|all" >&2
  exit 2
fi
for step in "$@"; do
  case $step in
    all) create; install; run_all; fetch; delete ;;
    run) run_all ;;
    create | install | log | fetch | delete) "$step" ;;
    *) echo "$0: no step $step: create, install, run, log, fetch, delete or all" >&2; exit 2 ;;
  esac
done
