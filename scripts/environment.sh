# Sourced by run_llama_train.sh, run_tests.sh and multinode_trainer.slurm: sets $python to a Python
# that has what pyproject.toml asks for. An active environment that has it is used as it is, and one that
# has torch but lacks a package is named with the command that installs it. Otherwise it is .venv in the
# repository, made if need be; it sees the torch of the Python that it is made with.
#   prepare_environment [test|gpu-test]     with the extras of that name

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

prepare_environment() {
    local extra=${1:-}
    if [ "$(uname -s)" != Linux ]; then # before gigabytes come
        echo "meshwright: it runs on Linux, and this is $(uname -s)" >&2
        echo "  fix: a Linux machine or container, or WSL 2" >&2
        exit 2
    fi
    local active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}} missing="" why="no environment is active"
    if [ -n "$active" ]; then
        if missing=$(missing_packages python "$extra") && [ -z "$missing" ]; then
            python=python
            # a person reads it; in the log of a job it is noise
            if [ -t 2 ] && ! python -c 'import importlib.metadata as m; m.version("meshwright")' 2>/dev/null; then
                echo "meshwright: for the command meshwright in this environment: python -m pip install" \
                    "--no-deps --editable $repository" >&2
            fi
            return
        fi
        if [ -n "$missing" ] && has_torch "$missing"; then
            complete python "$active" "$missing"
        fi
        why="the active environment $active has no torch that fits pyproject.toml"
    fi
    python=$repository/.venv/bin/python
    # the stamp is written last, so an interrupted set-up is taken up again
    local stamp=$repository/.venv/ready-${extra:-alone}
    local wanted
    wanted=$(requirements | cksum)
    if [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    local base system="" torch="fetches torch: 2.8 GB with CUDA (to use an environment of yours, activate it)"
    base=$(find_python) || {
        echo "meshwright: no Python >= 3.11 on the PATH; install one, or activate an environment" >&2
        exit 2
    }
    if missing=$(missing_packages "$base" "$extra") && has_torch "$missing"; then # as in a container
        if [ -z "$missing" ]; then
            python=$base
            return
        fi
        # a .venv made with an environment's Python would see the system's packages, not the environment's
        "$base" -c 'import sys; sys.exit(sys.prefix != sys.base_prefix)' || complete "$base" "$base" "$missing"
        system=--system-site-packages torch="takes the torch of $base"
    fi
    if [ -n "${SLURM_JOB_ID:-}" ]; then # compute nodes may have no network, and all would install at once
        echo "meshwright: no environment: sbatch has not passed an active one on (--export), and" \
            "$repository/.venv is not set up" >&2
        echo "  fix: on the login node, activate your environment or run ./run_llama_train.sh --help;" \
            "then submit again" >&2
        exit 2
    fi
    echo "meshwright: $why: setting up $repository/.venv with $("$base" --version) (once; minutes)," \
        "which $torch" >&2
    {
        make_environment "$base" "${extra:+[$extra]}" "$system" &&
            printf '%s\n' "$wanted" | tee "$stamp" >"$repository/.venv/ready-alone"
    } || {
        echo "meshwright: the set-up failed; run it again, or activate an environment of your own" >&2
        exit 1
    }
}

# has_torch MISSING: whether torch is not one of the missing packages
has_torch() {
    ! grep -q "^torch>" <<<"$1"
}

# complete PYTHON NAME MISSING: end with the command that installs what an environment with torch lacks; its
# torch may be the one that fits the GPUs, and .venv would fetch another
complete() {
    echo "meshwright: $2 has torch, but lacks $(join ', ' <<<"$3")" >&2
    echo "  fix: $1 -m pip install $(sed "s/.*/'&'/" <<<"$3" | join ' ')" >&2
    exit 2
}

# requirements: what an installation depends on; not the settings of lint and tests, whose edits need no network
requirements() {
    sed -n '/^dependencies = \[/,/^\]/p; /^\[project\.\(optional-dependencies\|scripts\)\]/,/^$/p' \
        "$repository/pyproject.toml"
    cat "$repository/requirements.txt"
}

# make_environment BASE_PYTHON EXTRAS SYSTEM: .venv, by uv where it is installed; but not where pip has
# settings (an index, certificates), which uv does not read. With SYSTEM, an option of venv, the base's own
# packages stay as they are, which uv would not see, and the pinned versions might replace
make_environment() {
    if [ -n "$3" ]; then
        "$1" -m venv "$3" "$repository/.venv" &&
            "$python" -m pip install --quiet --disable-pip-version-check --editable "$repository$2"
    elif command -v uv >/dev/null && [ -z "$("$1" -m pip config list 2>/dev/null)" ]; then
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

# missing_packages PYTHON EXTRA: the requirements in pyproject.toml that are not met, one a line; it fails if
# that Python cannot tell
missing_packages() {
    "$1" - "$repository/pyproject.toml" "$2" <<'PYTHON' 2>/dev/null
import sys, tomllib
from importlib.metadata import PackageNotFoundError, version

try:
    from packaging.requirements import Requirement
except ImportError:  # pip has a copy
    from pip._vendor.packaging.requirements import Requirement

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
wanted = project["dependencies"] + project["optional-dependencies"].get(sys.argv[2], [])
for requirement in map(Requirement, wanted):
    try:
        is_met = requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        is_met = False
    if not is_met:
        print(requirement)
PYTHON
}

# has_requirements PYTHON EXTRA: whether every requirement in pyproject.toml is met
has_requirements() {
    local missing
    missing=$(missing_packages "$1" "$2") && [ -z "$missing" ]
}

# join SEPARATOR: the lines of stdin in one
join() {
    local line all=""
    while IFS= read -r line; do all+=${all:+$1}$line; done
    printf '%s' "$all"
}
