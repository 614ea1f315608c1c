#!/usr/bin/env bash
# Minutes on GPUs that show the most: set up if need be, test, time, and leave a report.
#
#   scripts/gpu_smoke.sh [--minutes N] [FOLDER]    default: outputs/gpu_smoke; send back what is in it
#
# With --minutes, e.g. 4 or 8, each part ends by then: it may take half of the time that is left.
# No wait in a step, kernels, initial values, resumes, offload, documents, experts, compiled and
# deterministic runs, memory against the simulation. Then the speed of a cut 8B model, and rates of the
# device, which plans assume; a proof in the GPU's own kernels; meshes, which share a single GPU, a killed rank.
set -uo pipefail
seconds=0
if [ "${1:-}" = --minutes ]; then
    seconds=$(awk -v minutes="${2:-}" 'BEGIN { print int(60 * minutes) }')
    if ((seconds < 1)); then
        echo "--minutes ${2:-}: must be a positive number: write --minutes 8" >&2
        exit 2
    fi
    shift 2
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$here/scripts/environment.sh"
prepare_environment gpu-test
cd "$here"
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
deadline=0
((seconds)) && deadline=$((SECONDS + seconds))
folder=${1:-outputs/gpu_smoke}
mkdir -p "$folder"

failed=0
part() { # NAME SECONDS COMMAND...: its output is shown, and kept as NAME.txt
    local name=$1 limit=$2 share code
    shift 2
    if ((deadline)); then
        share=$(((deadline - SECONDS) / 2))
        ((share > 0)) || { echo "== $name: no time is left" && return; }
        limit=$((share < limit ? share : limit))
    fi
    echo "== $name"
    timeout -k 10 "$limit" "$@" 2>&1 | tee "$folder/$name.txt" # pipefail: of the command
    code=$?
    if ((code == 0)); then
        echo "== $name: passed"
    elif ((code == 124 && deadline)); then
        echo "== $name: stopped after $limit s"
    else
        echo "== $name: FAILED"
        failed=1
    fi
}

part driver 60 nvidia-smi
# -vv names each test when it begins, so that the output of a run that is killed says which ones hung
tests=(-m pytest -vv -n 4 --dist load -rs --durations=10)
part one_gpu 900 "$python" "${tests[@]}" tests/gpu/test_one_gpu.py
part speed 1500 "$python" benchmarks/gpu_speed.py "$folder/speed"
# a row as each case is done, and a line of what there are too few GPUs for
part prove 600 "$python" -m meshwright prove debug_model --gpu --output "$folder/proof"
part several_gpus 900 "$python" "${tests[@]}" tests/gpu/test_several_gpus.py
part overhead 300 "$python" benchmarks/overhead.py
part versions 60 "$python" -m torch.utils.collect_env
echo "== $folder holds the output of each part"
exit $failed
