#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
# without GPUs, delete the next line
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=04:00:00
# 120 s before the time limit Slurm sends SIGTERM to this script. Then the
# ranks write a checkpoint; Slurm may start the job again.
#SBATCH --signal=B:TERM@120 --requeue --open-mode=append

# the environment that hvpipe is installed in; if hvpipe was built with your
# cluster's MPI, "module load" that first
source "$HOME/venv/bin/activate"

export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"
export TF_NUM_INTRAOP_THREADS="$SLURM_CPUS_PER_TASK"

# Slurm names the hosts and the number of ranks.
hvpipe run --restarts 10 train.py &
job=$!
trap 'kill -TERM $job' TERM
wait $job; code=$?
# a signal ended the wait, not the job
while kill -0 $job 2>/dev/null; do wait $job; code=$?; done

# 75: all ranks have written a checkpoint, from which the next start goes on.
# The number is this job's, or this one's of an array.
number=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
case $code in 75) scontrol requeue "$number" ;; esac
exit $code
