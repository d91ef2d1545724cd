#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
# without GPUs, delete the next line
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=04:00:00
# 120 s before the time limit Slurm sends SIGTERM to all ranks. Then, or when
# the job is preempted, they write a checkpoint; Slurm may start it again.
#SBATCH --signal=TERM@120 --requeue --open-mode=append

# the environment that hvpipe is installed in; if hvpipe was built with your
# cluster's MPI, "module load" that first
source "$HOME/venv/bin/activate"

# the summary at the end, and hvpipe top
export HVPIPE_SUMMARY=1
export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"
export TF_NUM_INTRAOP_THREADS="$SLURM_CPUS_PER_TASK"

# --mpi: pmix for Open MPI, pmi2 for MPICH and Intel MPI. UCX's addresses can be
# too long for pmi2, and MPICH hangs: use slurm-run.sh instead, or this line:
# export MPIR_CVAR_CH4_NETMOD=ofi
# -c: since Slurm 22.05 srun does not take it from sbatch
# --kill-on-bad-exit=0: ranks that exit with 75 do not end the others
srun --mpi=pmix --kill-on-bad-exit=0 -c "$SLURM_CPUS_PER_TASK" python -u train.py
code=$?

# 75: all ranks have written a checkpoint, from which the next start goes on.
# The number is this job's, or this one's of an array.
number=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
case $code in 75) scontrol requeue "$number" ;; esac
exit $code
