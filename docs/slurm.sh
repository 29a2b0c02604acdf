#!/bin/bash
# Train on a SLURM cluster:  sbatch slurm.sh --config hotdog.yaml
# Arguments after the script's name go to `finetune fit`. See cloud.md.
#SBATCH --job-name=finetune
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

# The job's id stays the same through every requeue, so --resume finds this job's run and no other.
code=0
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    finetune fit --resume --out "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" \
    --trainer.num_nodes "$SLURM_NNODES" --trainer.devices "$SLURM_NTASKS_PER_NODE" \
    --data.num_workers "$SLURM_CPUS_PER_TASK" "$@" || code=$?

# 143: finetune saved on SIGTERM. A cancelled job is not requeued (Incomplete), and no job more than 20 times.
if [ "$code" -eq 143 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; then
    scontrol requeue Incomplete "$SLURM_JOB_ID"
fi
exit "$code"
