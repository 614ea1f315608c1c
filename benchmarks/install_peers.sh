#!/usr/bin/env bash
# Install the trainers that benchmarks/throughput.py compares with, each in an environment of its own
# below benchmarks/.peers; nothing of ours is touched. One that fails is left out of the comparison.
#
#   benchmarks/install_peers.sh [torchtitan] [transformers] [fabric]        (default: all)
#   TORCH     version of torch for all of them, the project's own   (default: 2.13.0)
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
torch=torch==${TORCH:-2.13.0}

install() { # NAME REQUIREMENT...
    local python=$here/.peers/$1/bin/python
    echo "$1: installing" >&2
    if command -v uv >/dev/null; then
        uv venv --quiet --allow-existing "$here/.peers/$1" &&
            uv pip install --quiet --python "$python" "$torch" numpy "${@:2}"
    else # torch by itself first: a newer one would be taken to please the others
        python3 -m venv "$here/.peers/$1" &&
            "$python" -m pip install --quiet --disable-pip-version-check "$torch" numpy &&
            "$python" -m pip install --quiet --disable-pip-version-check "$torch" "${@:2}"
    fi || echo "$1: could not be installed" >&2
}

for peer in "${@:-torchtitan transformers fabric}"; do
    for name in $peer; do
        case $name in
        torchtitan) install torchtitan torchtitan==0.2.2 tyro tensorboard datasets tokenizers torchdata einops ;;
        transformers) install transformers 'transformers>=5.23' accelerate ;;
        fabric) install fabric lightning-fabric ;;
        *) echo "$name: not a trainer that this script knows" >&2; exit 2 ;;
        esac
    done
done
