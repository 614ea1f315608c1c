# Sourced by run_llama_train.sh and benchmarks/throughput.py: environment variables that make ranks on
# this machine faster, and cannot be set later, from within a process. One that the user has set stays.
# Gains, and settings that gained nothing: docs/performance.md.
#     choose_host_settings RANKS [GPUS]     exports them, and lists those it chose in
#                                           $MESHWRIGHT_HOST_SETTINGS, which the job logs

export MESHWRIGHT_HOST_SETTINGS=
choose() { # NAME VALUE
    [ -z "${!1+set}" ] || return 0
    export "$1=$2"
    MESHWRIGHT_HOST_SETTINGS+="${MESHWRIGHT_HOST_SETTINGS:+ }$1=$2"
}

choose_host_settings() {
    local ranks=$1 gpus=${2:-0} cores
    cores=$(getconf _NPROCESSORS_ONLN)
    [ -n "${OMP_NUM_THREADS:-}" ] || unset OMP_NUM_THREADS # empty is no number
    # torchrun would give each rank a single thread, however many cores there are
    choose OMP_NUM_THREADS $((cores > ranks ? cores / ranks : 1))
    if [ "$gpus" -gt 0 ]; then
        if [ -z "${PYTORCH_CUDA_ALLOC_CONF+set}" ]; then
            choose PYTORCH_ALLOC_CONF expandable_segments:True # less memory lost between blocks
        fi
    elif [ -z "${LD_PRELOAD:-}${GLIBC_TUNABLES:-}" ] && getconf GNU_LIBC_VERSION >/dev/null 2>&1; then
        # glibc gives large blocks back to the kernel when they are freed, and every step gets them
        # anew, page by page. Another allocator (LD_PRELOAD) does not read these.
        choose MALLOC_MMAP_THRESHOLD_ 4294967296
        choose MALLOC_TRIM_THRESHOLD_ 8589934592
    fi
}
