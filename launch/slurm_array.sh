#!/usr/bin/env bash
# The same run with many seeds, as a SLURM array: sbatch launch/slurm_array.sh, from the checkout.
# With --dry-run after its name, also without sbatch, it prints what it would do. Edit three lines;
# docs/launch.md has the rest. Many settings: fedjax-flat sweep --engine slurm (docs/sweep.md).
#SBATCH --partition=gpu --time=08:00:00 --array=0-4
#SBATCH --gres=gpu:1 --cpus-per-task=8 --mem=32G
#SBATCH --signal=USR1@180 --requeue --open-mode=append --output=%x-%A_%a.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"
seed=${SLURM_ARRAY_TASK_ID:-0}
train=(--config configs/fedsam.py:cifar10 --run "runs/slurm_array/seed$seed" --data "$HOME/data")

source launch/common.bash
slurm_job --ntasks=1 -- "${train[@]}" --config.seed="$seed"
