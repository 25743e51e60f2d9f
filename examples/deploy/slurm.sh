#!/bin/bash
# sbatch examples/deploy/slurm.sh bin/worker
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
# With --gpus-per-task every task would see one GPU, and ranks could not map their peers' memory.
set -euo pipefail
export SWITCHYARD_DEBUG=info
srun --kill-on-bad-exit=1 "$@"
