#!/usr/bin/env bash
# sbatch slurm.sh: two nodes of eight GPUs, one process per GPU.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
set -euo pipefail

# Compile a step once, not once per job.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$HOME/.cache/jax}
# Start an exchange before the work that it can hide behind.
export XLA_FLAGS="--xla_gpu_enable_latency_hiding_scheduler=true ${XLA_FLAGS:-}"

srun python "$(dirname "$0")/train.py" --slurm --checkpoint "$PWD/checkpoint" "$@"
