#!/usr/bin/env bash
# Run the tests as other machines would, one row after the other, and name the tests that fail.
#
#   scripts/test_matrix.sh                                  six rows with every condition once: half an hour
#   scripts/test_matrix.sh --all                            the same with the slow tests
#   scripts/test_matrix.sh avx2 user+one-core               two rows: one condition, two at a time
#   scripts/test_matrix.sh avx2 -- tests/unit -k rope       pytest gets the arguments after --
#   scripts/test_matrix.sh --list                           conditions and rows
#
# A row joins its conditions by +: a failure needs one more run with each of them, and a green row saves
# one run for each. Each row tests a fresh clone of HEAD in a folder of its own. The conditions python3.11,
# python3.13, torch2.11 and torch2.13 need an interpreter that has the packages of '.[test]'. Name it by
# PYTHON_3_11, PYTHON_3_13, TORCH_2_11 or TORCH_2_13; otherwise the PATH is searched. USER_PYTHON is the
# interpreter of "user", if the user nobody cannot run the active one.
set -uo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repository/scripts/environment.sh"

conditions=(here default avx2 user one-core busy python3.11 python3.13 torch2.11 torch2.13 cold-compile
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
rows=(here umlauts+optim+symlink+readme python3.13+avx2 torch2.11+default+cold-compile user+one-core
    busy+no-compiler+python3.11+torch2.13)

chosen=() suite=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    if [ "$1" = --list ]; then
        for condition in "${conditions[@]}"; do printf '%-14s%s\n' "$condition" "${meaning[$condition]}"; done
        printf '\nrows:\n'
        printf '%s\n' "${rows[@]}"
        exit
    elif [ "$1" = --all ]; then
        suite=(--all)
    else
        for condition in ${1//+/ }; do
            [ -n "${meaning[$condition]:-}" ] && continue
            echo "test_matrix: no condition $condition; conditions: ${conditions[*]}" >&2
            exit 2
        done
        chosen+=("$1")
    fi
    shift
done
shift $(($# > 0)) # the --
[ ${#chosen[@]} -gt 0 ] || chosen=("${rows[@]}")

work=$(mktemp -d "${TMPDIR:-/tmp}/test_matrix.XXXXXX")
chmod 755 "$work"
cleanup() {
    [ ${#spinners[@]} = 0 ] || kill "${spinners[@]}" 2>/dev/null
    chmod -R u+w "$work" && rm -rf "$work"/*/
}
spinners=()
trap cleanup EXIT

# prepare ROW: sets $folder of the clone, $interpreter ("" for the active one), and $before, $unsets and
# $settings, the command and the options of env that run the tests as the row wants; $skipped if this
# machine cannot
prepare() {
    local above=$work/$1 name=checkout condition checks="import sys, torch" real=""
    interpreter="" skipped="" before=() unsets=() settings=() folder=$above
    mkdir -m 1777 "$above/cache"
    for condition in ${1//+/ }; do
        case $condition in
        # torch fails where ATen is told to do without the instructions that oneDNN uses; and inductor
        # finds graphs again that it made for a CPU with other instructions
        default) settings+=(ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 TORCHINDUCTOR_CACHE_DIR="$above/cache") ;;
        avx2)
            settings+=(ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2)
            settings+=(TORCHINDUCTOR_CACHE_DIR="$above/cache") ;;
        cold-compile) settings+=(TORCHINDUCTOR_CACHE_DIR="$above/cache") ;;
        one-core) before+=(taskset -c 0) ;;
        python3.*)
            choose_interpreter "PYTHON_3_${condition#*.}" "$condition"
            checks+="; assert sys.version_info[:2] == (3, ${condition#*.}), 'not Python ${condition#python}'" ;;
        torch2.*)
            choose_interpreter "TORCH_2_${condition#*.}" python
            checks+="; assert torch.__version__.startswith('${condition#torch}.'), 'not ${condition}'" ;;
        user) [[ +$1+ != *+readme+* ]] || skipped="in a read-only checkout there is no .venv to make" ;;
        readme) name=meshwright ;;
        optim) folder+=/torch/optim/distributed/launch ;;
        umlauts) folder+="/Größe der Welt/mein Ordner" ;;
        symlink) real=real ;;
        esac
    done
    [ -z "$skipped" ] || return
    mkdir -p "$folder${real:+/$real}"
    [ -z "$real" ] || { ln -s real "$folder/link" && folder+=/link; }
    folder+=/$name
    git clone --quiet "$repository" "$folder" 2>"$above.log" || skipped="git clone: $(tail -1 "$above.log")"
    [[ +$1+ != *+user+* ]] || be_a_user "$above"
    [ -z "$interpreter" ] || check_interpreter "$checks"
    [ -n "$skipped" ] || set_path "+$1+" "$above"
}

# choose_interpreter VARIABLE NAME: the one that the variable names, else one that another condition chose
choose_interpreter() {
    interpreter=${!1:-${interpreter:-$2}}
}

check_interpreter() {
    local problem
    if ! problem=$("$interpreter" -c "$1" 2>&1); then
        skipped="$interpreter: $(tail -1 <<<"$problem"); see the head of this script"
    elif ! has_requirements "$interpreter" test; then
        skipped="$interpreter has not the packages of '.[test]'"
    fi
}

# set_path +ROW+ FOLDER: the interpreter's environment first, where there is one, and no compiler if the row says so
set_path() {
    local path=${PATH#"${VIRTUAL_ENV:-/none}/bin:"} home=${VIRTUAL_ENV:-}
    [ -z "$interpreter" ] || home=$("$interpreter" -c 'import sys; print(sys.prefix)')
    if [[ $1 = *+no-compiler+* ]]; then
        link_all_but_compilers "$2/bin" "$path"
        path=$2/bin settings+=(CXX=none)
    fi
    if [[ $1 = *+readme+* ]]; then # an interpreter that a condition names is the base of .venv
        unsets+=(-u VIRTUAL_ENV -u CONDA_PREFIX)
        settings+=(PATH="${interpreter:+$home/bin:}$path")
    else
        settings+=(${home:+VIRTUAL_ENV="$home"} PATH="${home:+$home/bin:}$path")
    fi
}

be_a_user() {
    mkdir -p "$1/home" "$1/tmp"
    chmod -R a-w,a+rX "$folder" "$1/home"
    chmod 1777 "$1/tmp"
    interpreter=${interpreter:-${USER_PYTHON:-}}
    unsets+=(-u XDG_CACHE_HOME -u HF_HOME)
    settings+=(HOME="$1/home" TMPDIR="$1/tmp" USER=nobody LOGNAME=nobody)
    if [ "$(id -u)" = 0 ]; then
        before+=(setpriv --reuid=nobody --regid="$(id -g nobody)" --clear-groups)
        "${before[@]}" "$(command -v "${interpreter:-python}")" -c "import torch" 2>/dev/null ||
            skipped="nobody cannot run ${interpreter:-$(command -v python)}; set USER_PYTHON"
    fi
}

# link_all_but_compilers FOLDER PATH: fills the folder with links to every command of PATH but compilers
link_all_but_compilers() {
    local IFS=: directory
    mkdir -p "$1"
    for directory in $2; do
        find "$directory" -maxdepth 1 ! -type d 2>/dev/null
    done | grep -vE '/([^/]*-)?(cc|gcc|g\+\+|c\+\+|c89|c99|clang|clang\+\+)(-[0-9.]+)?$' |
        while IFS= read -r command; do ln -s "$command" "$1" 2>/dev/null; done
}

table=() is_red=0 commit=$(git -C "$repository" rev-parse --short HEAD)
for row in "${chosen[@]}"; do
    mkdir -p "$work/$row"
    prepare "$row"
    if [ -n "$skipped" ]; then
        table+=("$(printf '%-38s%5s  not run: %s' "$row" - "$skipped")")
        continue
    fi
    [[ +$row+ != *+busy+* ]] || for _ in 1 2 3 4; do (while :; do :; done) & spinners+=($!); done
    echo "test_matrix: $row ($folder)" >&2
    for condition in ${row//+/ }; do echo "  $condition: ${meaning[$condition]}" >&2; done
    SECONDS=0
    (cd "$folder" && "${before[@]}" env "${unsets[@]}" "${settings[@]}" ./run_tests.sh "${suite[@]}" "$@") 2>&1 </dev/null | tee "$work/$row.log"
    code=${PIPESTATUS[0]}
    [ ${#spinners[@]} = 0 ] || { kill "${spinners[@]}" && wait "${spinners[@]}"; } 2>/dev/null
    spinners=()
    summary=$(grep -E '^[0-9]+ (passed|failed|skipped|error)|no tests ran' "$work/$row.log" | tail -1)
    table+=("$(printf '%-38s%5s  %s' "$row" "$((SECONDS / 60)).$((SECONDS % 60 / 6))" "${summary:-exit code $code}")")
    [ "$code" = 0 ] || is_red=1
    while IFS= read -r failed; do
        table+=("$(printf '%21s%s' "" "${failed:0:200}")")
    done < <(grep -E '^(FAILED|ERROR) ' "$work/$row.log")
    chmod -R u+w "$work/$row" && rm -rf "${work:?}/$row"
done
printf '\n%-38s%5s  result at %s\n' row min "$commit"
printf '%s\n' "${table[@]}"
echo "logs: $work"
exit $is_red
