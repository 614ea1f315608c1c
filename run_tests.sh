#!/usr/bin/env bash
# Set up if need be, then test, several files at a time; arguments go to pytest.
#
#   ./run_tests.sh                         all tests but those marked slow: under 5 minutes on 2 cores
#   ./run_tests.sh --all                   all tests, as CI runs them
#   ./run_tests.sh tests/unit -k rope
#   ./run_tests.sh -n 0 --pdb              one test at a time, in this process
#   ./run_tests.sh tests/gpu               those of GPUs, which hide from all others
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/scripts/environment.sh"
prepare_environment test
cd "$here"
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} # an active environment need not hold meshwright
cores=$("$python" -c 'from meshwright.system.machine import count_cores; print(count_cores())')
workers=$((cores / 2 + 2)) # many tests wait: for ranks, signals and clocks
chosen=(-m "not slow") given=()
for argument; do
    if [[ $argument == --all ]]; then chosen=(); else given+=("$argument"); fi
done
set -- "${given[@]}"
failed=0
if (($# == 0)) && timeout 20 nvidia-smi -L >/dev/null 2>&1; then # a driver that is ill hangs, or fails
    "$python" -m pytest -n 4 --dist load "${chosen[@]}" tests/gpu || failed=$? # all others hide the GPUs
fi
# a file stays on one worker, with its fixtures; in order, so that ranks live on from file to file
"$python" -m pytest -n "$workers" --dist loadfile --no-loadscope-reorder "${chosen[@]}" "$@" || failed=$?
exit "$failed"
