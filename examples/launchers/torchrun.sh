#!/bin/bash
# Run the same command on each node. HEAD is node 0's address, NODES is the number of nodes, and RESTARTS (default 3) is
# the maximum number of restarts after failures:
#   HEAD=10.0.0.1 NODES=2 bash torchrun.sh train.py
# Needs fit(resume_from='last') and a ModelCheckpoint in a folder that all nodes can access: a restart resumes from the
# newest checkpoint.
set -euo pipefail
exec torchrun \
    --nnodes="${NODES:-1}" \
    --nproc-per-node="${RANKS:-gpu}" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="${HEAD:-localhost}:${PORT:-29400}" \
    --rdzv-id="${JOB:-trainloop}" \
    --max-restarts="${RESTARTS:-3}" \
    "$@"
