#!/usr/bin/env bash
# The same script under a launcher: torchrun starts the two processes, and TrainLoop joins them.
#   bash examples/torchrun.sh --epochs 3
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc-per-node=2 examples/ddp_training.py "$@"
