# Sourced by run_llama_train.sh, run_tests.sh and multinode_trainer.slurm: sets $python to a Python
# that has what pyproject.toml asks for. An active environment that has it is used as it is; else
# .venv in the repository is, and made if need be.
#   prepare_environment [test]     with the extras of that name

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

prepare_environment() {
    local extra=${1:-}
    if [ "$(uname -s)" != Linux ]; then # before gigabytes come
        echo "meshwright: it runs on Linux, and this is $(uname -s)" >&2
        echo "  fix: a Linux machine or container, or WSL 2" >&2
        exit 2
    fi
    if [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && has_requirements python "$extra"; then
        python=python
        # a person reads it; in the log of a job it is noise
        if [ -t 2 ] && ! python -c 'import importlib.metadata as m; m.version("meshwright")' 2>/dev/null; then
            echo "meshwright: for the command meshwright in this environment: python -m pip install" \
                "--no-deps --editable $repository" >&2
        fi
        return
    fi
    python=$repository/.venv/bin/python
    # the stamp is written last, so an interrupted set-up is taken up again
    local stamp=$repository/.venv/ready-${extra:-alone}
    local wanted
    wanted=$(requirements | cksum)
    if [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    if [ -n "${SLURM_JOB_ID:-}" ]; then # compute nodes may have no network, and all would install at once
        echo "meshwright: no environment: sbatch has not passed an active one on (--export), and" \
            "$repository/.venv is not set up" >&2
        echo "  fix: on the login node, activate your environment or run ./run_llama_train.sh --help;" \
            "then submit again" >&2
        exit 2
    fi
    local base
    base=$(find_python) || {
        echo "meshwright: no Python >= 3.11 on the PATH; install one, or activate an environment" >&2
        exit 2
    }
    echo "meshwright: setting up $repository/.venv with $("$base" --version) (once; minutes)" >&2
    {
        make_environment "$base" "${extra:+[$extra]}" &&
            printf '%s\n' "$wanted" | tee "$stamp" >"$repository/.venv/ready-alone"
    } || {
        echo "meshwright: the set-up failed; run it again, or activate an environment of your own" >&2
        exit 1
    }
}

# requirements: what an installation depends on; not the settings of lint and tests, whose edits need no network
requirements() {
    sed -n '/^dependencies = \[/,/^\]/p; /^\[project\.\(optional-dependencies\|scripts\)\]/,/^$/p' \
        "$repository/pyproject.toml"
    cat "$repository/requirements.txt"
}

# make_environment BASE_PYTHON EXTRAS: .venv, by uv where it is installed; but not where pip has settings
# (an index, certificates), which uv does not read
make_environment() {
    if command -v uv >/dev/null && [ -z "$("$1" -m pip config list 2>/dev/null)" ]; then
        uv venv --quiet --allow-existing --seed --python "$1" "$repository/.venv" &&
            uv pip install --quiet --python "$python" \
                --constraint "$repository/requirements.txt" --editable "$repository$2"
    else
        "$1" -m venv "$repository/.venv" &&
            "$python" -m pip install --quiet --disable-pip-version-check \
                --constraint "$repository/requirements.txt" --editable "$repository$2"
    fi
}

find_python() {
    local name
    for name in python3 python3.13 python3.12 python3.11 python; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    return 1
}

# has_requirements PYTHON EXTRA: whether every requirement in pyproject.toml is met
has_requirements() {
    "$1" - "$repository/pyproject.toml" "$2" <<'PYTHON' 2>/dev/null
import sys, tomllib
from importlib.metadata import PackageNotFoundError, version
from packaging.requirements import Requirement  # not there: neither is what needs it

project = tomllib.load(open(sys.argv[1], "rb"))["project"]
wanted = project["dependencies"] + project["optional-dependencies"].get(sys.argv[2], [])
try:
    met = all(r.specifier.contains(version(r.name), prereleases=True) for r in map(Requirement, wanted))
except PackageNotFoundError:
    met = False
sys.exit(not met)
PYTHON
}
