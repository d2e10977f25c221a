#!/bin/bash
# One worker a machine, with all the GPUs of its job there:  sbatch slurm.sh train.py --epochs 10
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
set -uo pipefail

# From version 22.05 on srun no longer takes this number from sbatch by itself.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
# Large pages for large buffers; see docs/how-to/launch.md.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:+$GLIBC_TUNABLES:}glibc.malloc.hugetlb=1"
# For the program, which reads its last checkpoint when this is not 0.
export REPLICAX_RESTART_COUNT="${SLURM_RESTART_COUNT:-0}"

# When one task fails the others are ended too. --label puts the task's number in front of its output.
srun --kill-on-bad-exit=1 --label python "$@"
status=$?

# After a failure of a machine Slurm itself queues the job again (--requeue); after a failure of the program we do.
if ((status != 0 && REPLICAX_RESTART_COUNT < 3)); then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
