#!/usr/bin/env bash
# In this folder: sbatch slurm.sh [arguments for train.py]. Two nodes of eight GPUs, one
# process per GPU. SLURM runs a copy of this file, so train.py is looked for where sbatch
# was called.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
set -euo pipefail

# GPUs are asked for by node, not by task: a process of JAX takes the GPU with its own
# number on the node, so it must see all of them.
folder=${SLURM_SUBMIT_DIR:-$(dirname "$0")}
# Compile a step once, not once per job.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$HOME/.cache/jax}
# Start an exchange before the work that it can hide behind.
export XLA_FLAGS="--xla_gpu_enable_latency_hiding_scheduler=true ${XLA_FLAGS:-}"

# srun does not take the number of CPUs over from sbatch.
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "${PYTHON:-python}" "$folder/train.py" \
    --slurm --checkpoint "$PWD/checkpoint" "$@"
