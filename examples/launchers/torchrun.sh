#!/bin/bash
# The same line on each node. Node 0's address, how many nodes, and how many times all ranks start anew when one fails:
#   HEAD=10.0.0.1 NODES=2 bash torchrun.sh train.py
# Needs fit(resume_from='last') and a ModelCheckpoint in a folder that all nodes see: a restart begins at the newest one.
set -euo pipefail
exec torchrun \
    --nnodes="${NODES:-1}" \
    --nproc-per-node="${RANKS:-gpu}" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="${HEAD:-localhost}:${PORT:-29400}" \
    --rdzv-id="${JOB:-trainloop}" \
    --max-restarts="${RESTARTS:-3}" \
    "$@"
