#!/usr/bin/env bash
# Run the tests as other machines would, one row after the other, and name the tests that fail.
#
#   scripts/test_matrix.sh                              every row, every test: hours
#   scripts/test_matrix.sh avx2 one-core                two rows
#   scripts/test_matrix.sh avx2 -- tests/unit -k rope   pytest gets the arguments after --
#   scripts/test_matrix.sh --list                       the rows
#
# Each row tests a fresh clone of HEAD in a folder of its own. The rows python3.11, python3.13, torch2.11
# and torch2.13 need an interpreter that has the packages of '.[test]'. Name it by PYTHON_3_11,
# PYTHON_3_13, TORCH_2_11 or TORCH_2_13; otherwise the PATH is searched. USER_PYTHON is the interpreter of
# row "user", if the user nobody cannot run the active one.
set -uo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repository/scripts/environment.sh"

rows=(here default avx2 user one-core busy python3.11 python3.13 torch2.11 torch2.13 cold-compile
    no-compiler readme optim umlauts symlink)
declare -A meaning=(
    [here]="as ./run_tests.sh"
    [default]="kernels of ATen without vector instructions"
    [avx2]="kernels of a CPU that has AVX2 and no AVX-512"
    [user]="not root; checkout and HOME are read-only"
    [one-core]="all processes on core 0"
    [busy]="four busy processes beside the tests"
    [python3.11]="Python 3.11" [python3.13]="Python 3.13"
    [torch2.11]="torch 2.11" [torch2.13]="torch 2.13"
    [cold-compile]="torch.compile's cache is empty"
    [no-compiler]="no C++ compiler"
    [readme]="README's way: .venv in a checkout called meshwright"
    [optim]="checkout below a folder called optim"
    [umlauts]="checkout below a folder with blanks and umlauts"
    [symlink]="checkout behind a symlink"
)

chosen=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    if [ "$1" = --list ]; then
        for row in "${rows[@]}"; do printf '%-14s%s\n' "$row" "${meaning[$row]}"; done
        exit
    elif [ -z "${meaning[$1]:-}" ]; then
        echo "test_matrix: no row $1; rows: ${rows[*]}" >&2
        exit 2
    fi
    chosen+=("$1")
    shift
done
shift $(($# > 0)) # the --
[ ${#chosen[@]} -gt 0 ] || chosen=("${rows[@]}")

work=$(mktemp -d "${TMPDIR:-/tmp}/test_matrix.XXXXXX")
chmod 755 "$work"
cleanup() {
    kill "${spinners[@]}" 2>/dev/null
    chmod -R u+w "$work" && rm -rf "$work"/*/
}
spinners=()
trap cleanup EXIT

# interpreter_of TEXT VARIABLE NAME CHECK: sets $interpreter, or $skipped to the reason why there is none
interpreter_of() {
    interpreter=$(command -v "${!2:-$3}") || skipped="no $1; set $2 to an interpreter"
    [ -z "$skipped" ] || return
    if ! "$interpreter" -c "$4" 2>/dev/null || ! has_requirements "$interpreter" test; then
        skipped="$interpreter is not $1 with the packages of '.[test]'; set $2"
    fi
}

# prepare ROW: sets $folder of the clone, $interpreter ("" for the active one), and $wrap, the command
# that runs the tests as the row wants; $skipped if this machine cannot
prepare() {
    local row=$1 minor=${1#*3.} release=${1#torch} above=$work/$1
    folder=$above/checkout interpreter="" skipped="" wrap=(env)
    case $row in
    # torch fails where ATen is told to do without the instructions that oneDNN uses; and inductor finds
    # graphs again that it made for a CPU with other instructions
    default) wrap+=(ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 TORCHINDUCTOR_CACHE_DIR="$above/cache") ;;
    avx2)
        wrap+=(ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2)
        wrap+=(TORCHINDUCTOR_CACHE_DIR="$above/cache") ;;
    one-core) wrap+=(taskset -c 0) ;;
    python3.*)
        interpreter_of "Python 3.$minor" "PYTHON_3_$minor" "$row" \
            "import sys; assert sys.version_info[:2] == (3, $minor)" ;;
    torch2.*)
        interpreter_of "torch $release" "TORCH_${release/./_}" python \
            "import torch; assert torch.__version__.startswith('$release.')" ;;
    cold-compile) wrap+=(TORCHINDUCTOR_CACHE_DIR="$above/cache") ;;
    no-compiler) wrap+=(CXX=none PATH="$(path_without_compilers "$above/bin")") ;;
    readme)
        folder=$above/meshwright
        wrap+=(-u VIRTUAL_ENV -u CONDA_PREFIX PATH="${PATH#"${VIRTUAL_ENV:-}/bin:"}") ;;
    optim) folder=$above/torch/optim/distributed/launch/checkout ;;
    umlauts) folder="$above/Größe der Welt/mein Ordner" ;;
    symlink)
        folder=$above/link
        mkdir "$above/real" && ln -s real "$folder" ;;
    esac
    [ -z "$skipped" ] || return
    if ! git clone --quiet "$repository" "$folder" 2>"$above.log"; then
        skipped="git clone: $(tail -1 "$above.log")"
    elif [ "$row" = user ]; then
        be_a_user "$above"
    fi
}

be_a_user() {
    mkdir -p "$1/home" "$1/tmp"
    chmod -R a-w,a+rX "$folder" "$1/home"
    chmod 1777 "$1/tmp"
    wrap+=(-u XDG_CACHE_HOME -u HF_HOME HOME="$1/home" TMPDIR="$1/tmp" USER=nobody LOGNAME=nobody)
    interpreter=${USER_PYTHON:-}
    if [ "$(id -u)" = 0 ]; then
        wrap=(setpriv --reuid=nobody --regid="$(id -g nobody)" --clear-groups "${wrap[@]}")
        "${wrap[@]}" "$(command -v "${interpreter:-python}")" -c pass 2>/dev/null ||
            skipped="nobody cannot run ${interpreter:-$(command -v python)}; set USER_PYTHON"
    fi
}

# path_without_compilers FOLDER: fills it with links to every command but compilers; prints a PATH
path_without_compilers() {
    local IFS=: directory
    mkdir -p "$1"
    for directory in $PATH; do
        find "$directory" -maxdepth 1 ! -type d 2>/dev/null
    done | grep -vE '/([^/]*-)?(cc|gcc|g\+\+|c\+\+|c89|c99|clang|clang\+\+)(-[0-9.]+)?$' |
        while IFS= read -r command; do ln -s "$command" "$1" 2>/dev/null; done
    printf %s "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin:}$1"
}

table=() is_red=0
for row in "${chosen[@]}"; do
    mkdir -p "$work/$row"
    prepare "$row"
    if [ -n "$skipped" ]; then
        table+=("$(printf '%-14s%5s  not run: %s' "$row" - "$skipped")")
        continue
    fi
    if [ -n "$interpreter" ]; then
        home=$("$interpreter" -c 'import sys; print(sys.prefix)')
        wrap+=(VIRTUAL_ENV="$home" PATH="$home/bin:$PATH")
    fi
    [ "$row" != busy ] || for _ in 1 2 3 4; do (while :; do :; done) & spinners+=($!); done
    echo "test_matrix: $row: ${meaning[$row]} ($folder)" >&2
    SECONDS=0
    (cd "$folder" && "${wrap[@]}" ./run_tests.sh --all "$@") 2>&1 </dev/null | tee "$work/$row.log"
    code=${PIPESTATUS[0]}
    [ ${#spinners[@]} = 0 ] || { kill "${spinners[@]}" && wait "${spinners[@]}"; } 2>/dev/null
    spinners=()
    summary=$(grep -E '^[0-9]+ (passed|failed|skipped|error)|no tests ran' "$work/$row.log" | tail -1)
    table+=("$(printf '%-14s%5s  %s' "$row" "$((SECONDS / 60)).$((SECONDS % 60 / 6))" "${summary:-exit code $code}")")
    [ "$code" = 0 ] || is_red=1
    while IFS= read -r failed; do
        table+=("$(printf '%21s%s' "" "${failed:0:200}")")
    done < <(grep -E '^(FAILED|ERROR) ' "$work/$row.log")
    chmod -R u+w "$work/$row" && rm -rf "${work:?}/$row"
done
printf '\n%-14s%5s  %s\n' row min result
printf '%s\n' "${table[@]}"
echo "logs: $work"
exit $is_red
