#!/usr/bin/env bash
# Minutes on GPUs that show the most: set up if need be, test, time, and leave a report.
#
#   scripts/gpu_smoke.sh [FOLDER]        default: outputs/gpu_smoke; what to send back is in it
#
# No wait in a step, kernels, initial values, resumes, offload, documents, experts, compiled and
# deterministic runs, memory against the simulation; meshes, which share a single GPU, a killed rank.
# Last, the speed of a cut 8B model, and rates of the device, which plans assume.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$here/scripts/environment.sh"
prepare_environment gpu-test
cd "$here"
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
folder=${1:-outputs/gpu_smoke}
mkdir -p "$folder"

failed=0
part() { # NAME SECONDS COMMAND...: its output is shown, and kept as NAME.txt
    local name=$1 limit=$2
    shift 2
    echo "== $name"
    if timeout "$limit" "$@" 2>&1 | tee "$folder/$name.txt"; then # pipefail: of the command
        echo "== $name: passed"
    else
        echo "== $name: FAILED"
        failed=1
    fi
}

part driver 60 nvidia-smi
part versions 60 "$python" -m torch.utils.collect_env
# -vv names each test when it begins, so that the output of a run that is killed says which ones hung
tests=(-m pytest -vv -n 4 --dist load -rs --durations=10)
part one_gpu 900 "$python" "${tests[@]}" tests/gpu/test_one_gpu.py
part several_gpus 900 "$python" "${tests[@]}" tests/gpu/test_several_gpus.py
part overhead 300 "$python" benchmarks/overhead.py
part speed 1500 "$python" benchmarks/gpu_speed.py "$folder/speed"
echo "== $folder holds the output of each part"
exit $failed
