#!/usr/bin/env bash
# One GPU under SLURM: sbatch launch/slurm_gpu.sh, from the checkout. With --dry-run after its name,
# also without sbatch, it prints what it would do. Edit three lines; docs/launch.md has the rest.
#SBATCH --partition=gpu --time=08:00:00
#SBATCH --gres=gpu:1 --cpus-per-task=8 --mem=32G
#SBATCH --signal=USR1@180 --requeue --open-mode=append --output=%x-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"
train=(--config configs/fedsam.py:cifar10 --run runs/slurm_gpu --data "$HOME/data")

source launch/common.bash
slurm_job --ntasks=1 -- "${train[@]}"
