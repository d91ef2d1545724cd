#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=04:00:00

# the environment that hvpipe is installed in; before it, "module load openmpi"
# if hvpipe was built with your cluster's MPI
source "${VENV:-$HOME/venv}/bin/activate"

# the summary at the end, and hvpipe top
export HVPIPE_SUMMARY=1
# after a failure: hvpipe blackbox crashes
export HVPIPE_FLIGHT_RECORDER="$SLURM_SUBMIT_DIR/crashes"
export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"
export TF_NUM_INTRAOP_THREADS="$SLURM_CPUS_PER_TASK"

# --mpi: pmix for Open MPI, pmi2 for MPICH and Intel MPI
# -c: since Slurm 22.05 srun does not take it from sbatch
# -K: if one rank fails, all ranks end
srun --mpi="${PMI:-pmix}" -K -c "$SLURM_CPUS_PER_TASK" python -u "${@:-train.py}"
