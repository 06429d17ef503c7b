#!/usr/bin/env bash
# Use every mode once and run a part of tests/unit on the pretended macOS and Windows, side by side: run.sh PYTHON
# run.sh PYTHON darwin (or win32) does so on one of them. MODES="single ddp" uses those only.
set -u
cd "$(dirname "$0")/../.."
python=$1 only=${2-}
unit=(unit/callbacks/test_callbacks_early_stopping unit/checkpoint/test_checkpoint unit/checkpoint/test_checkpoint_storage
  unit/evaluation/test_evaluation unit/logs/test_history unit/logs/test_metrics house/test_platform unit/data/test_rng)
try() {
  export PRETEND_PLATFORM=$1 PYTHONPATH=tests/pretended
  "$python" tests/pretended/modes.py ${MODES-} && "$python" -m pytest -q -p no:cacheprovider "${unit[@]/#/tests/}"
}
unit=("${unit[@]/%/.py}")
log=$(mktemp)
failed=()
# matplotlib lists a system's fonts once. Windows' are in its registry, which only a real one has.
MPLCONFIGDIR=$(mktemp -d)
export MPLCONFIGDIR
"$python" -c "import matplotlib.font_manager"
if [ "$only" != win32 ]; then
  try darwin >"$log" 2>&1 &
fi
if [ "$only" != darwin ]; then
  try win32 || failed+=(Windows)
fi
if [ "$only" != win32 ]; then
  wait $! || failed+=(macOS)
  cat "$log"
fi
rm -rf "$log" "$MPLCONFIGDIR"
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed on the pretended ${failed[*]}" >&2
  exit 1
fi
