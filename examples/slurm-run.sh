#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=04:00:00
# Slurm tells this script two minutes before the time limit, and may start it
# again; the output of all starts goes into one file.
#SBATCH --signal=B:TERM@120 --requeue --open-mode=append

# the environment that hvpipe is installed in; before it, "module load openmpi"
# if hvpipe was built with your cluster's MPI
source "${VENV:-$HOME/venv}/bin/activate"

export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"
export TF_NUM_INTRAOP_THREADS="$SLURM_CPUS_PER_TASK"

# Slurm names the hosts and the number of ranks.
hvpipe run ${HVPIPE_RUN_OPTIONS---restarts 10} "${@:-train.py}" & job=$!
trap 'kill -TERM $job' TERM
wait $job; code=$?
# a signal ended the wait, not the job
while kill -0 $job 2>/dev/null; do wait $job; code=$?; done

# 75: stopped with a complete checkpoint, from which the next start goes on
if [ $code = 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
