#!/usr/bin/env bash
# Several nodes under SLURM, one process per GPU: sbatch launch/slurm_nodes.sh, from the checkout.
# With --dry-run after its name, also without sbatch, it prints what it would do. Edit three lines;
# docs/launch.md has the rest.
#SBATCH --partition=gpu --time=08:00:00
#SBATCH --nodes=2 --ntasks-per-node=4 --gres=gpu:4 --cpus-per-task=8 --mem=0
#SBATCH --signal=USR1@180 --requeue --open-mode=append --output=%x-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"
train=(--config configs/fedsam.py:cifar100 --run runs/slurm_nodes --data "$HOME/data")

source launch/common.bash
# Every process sees all GPUs of its node, of which jax takes the one of its place there. The first
# to end must not end the others, which may be saving; when one dies, they have two minutes.
slurm_job --gpu-bind=none --kill-on-bad-exit=0 --wait=120 -- \
  "${train[@]}" --coordinator auto --timeout 300
