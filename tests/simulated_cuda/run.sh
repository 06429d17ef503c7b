#!/usr/bin/env bash
# run.sh ENVIRONMENT COMMAND...: a command with two simulated GPUs (FAKECUDA_DEVICES), in a virtual environment that is
# made where there is none (4.8 GB: PyPI's torch with CUDA's libraries); e.g. run.sh .venv-simulated-gpu pytest tests/gpu
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
VENV=${1:?a folder for the environment}
shift
[[ -e $VENV/bin/python ]] || "${PYTHON:-python3}" -m venv "$VENV"
VENV=$(cd "$VENV" && pwd)
PY=$VENV/bin/python
if ! "$PY" -c 'import torch; assert torch.version.cuda' 2>/dev/null; then
  # Not a wheel without CUDA that a configuration of pip prefers.
  PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS='' "$PY" -m pip install -q torch==2.13.0 'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-cccl==13.0.*'
fi
"$PY" -c 'import pytest, tensorboard, psutil' 2>/dev/null ||
  "$PY" -m pip install -q -c "$ROOT/constraints.txt" numpy tqdm tensorboard cloudpickle typing_extensions psutil filelock pytest hypothesis
BUILD=$VENV/simulated_cuda
if [[ ! -e $BUILD/fakeops.so || -n $(find "$HERE" -name '*.c*' -newer "$BUILD/fakeops.so") ]]; then
  bash "$HERE/build.sh" "$PY" "$BUILD"
fi
# Seen by every interpreter of the environment, those that tests start with a path of their own too; only FAKEGPU acts.
# Not a sitecustomize: Debian's Python has one of its own, which it finds first.
printf '%s\n' "$HERE/site" "$HERE/nvml" 'import fakegpu_start' >"$("$PY" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/simulated_cuda.pth"
export FAKEGPU=1 FAKECUDA_BUILD=$BUILD OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PATH=$VENV/bin:$PATH
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
LD_PRELOAD=$BUILD/libcudart.so.13:$BUILD/libcuda.so.1:$BUILD/libnccl.so.2 exec "$@"
