#!/usr/bin/env bash
# Set up if need be, check the config, tokenise what is not yet, train.
#
#   ./run_llama_train.sh [--section.key value ...]         e.g. --training.steps 1000
#   ./run_llama_train.sh --help                            every key
#
#   NGPU         ranks on this machine            (default: NVIDIA GPUs, else 2 CPU ranks)
#   CONFIG_FILE  TOML                             (default: train_configs/debug_model.toml)
#   LOG_RANK     ranks of each machine whose log is shown  (default: 0; e.g. 0,1)
#   PYTORCH_ALLOC_CONF  torch's memory of GPUs      (default: expandable_segments:True)
#   OMP_NUM_THREADS, MALLOC_*  of ranks on CPUs   (default: scripts/host_settings.sh)
#   NNODES       machines                         (default: 1)
#   RDZV_ENDPOINT  host:port of one of them, the same on all; needed above one machine
#   RDZV_ID      name of the job at that endpoint (default: meshwright)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/scripts/environment.sh"
source "$here/scripts/host_settings.sh"
prepare_environment
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} # an active environment need not hold meshwright

for word in "$@"; do
    if [ "$word" = --help ] || [ "$word" = -h ]; then
        exec "$python" -m meshwright.cli.main config --help
    fi
done

count_gpus() { # as torch will see them, without the seconds that importing it takes
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        tr ',' '\n' <<<"${CUDA_VISIBLE_DEVICES%%-1*}" | grep -c '[^ ]' || true # -1 ends the list
    else
        { nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU' || true
    fi
}

gpus=$(count_gpus)
ranks=${NGPU:-$((gpus > 0 ? gpus : 2))}
nodes=${NNODES:-1}
config=${CONFIG_FILE:-$here/train_configs/debug_model.toml}
arguments=(--job.config_file "$config" "$@")

if [[ ! $ranks =~ ^[1-9][0-9]*$ || ! $nodes =~ ^[1-9][0-9]*$ ]]; then
    echo "meshwright: NGPU = $ranks, NNODES = $nodes: must be positive numbers" >&2
    exit 2
fi
if [ "$gpus" -gt 0 ] && [ "$ranks" -gt "$gpus" ]; then
    echo "meshwright: NGPU = $ranks: there are $gpus GPUs" >&2
    echo "  fix: lower it, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU" >&2
    exit 2
fi
export MESHWRIGHT_GPUS=$gpus # ranks compare it with the number that torch can use
log_rank=${LOG_RANK:-0}
for shown in ${log_rank//,/ }; do
    if [[ ! $shown =~ ^[0-9]+$ ]] || [ "$shown" -ge "$ranks" ]; then
        echo "meshwright: LOG_RANK = $log_rank: must be ranks from 0 to $((ranks - 1))" >&2
        exit 2
    fi
done

if [ "$nodes" -eq 1 ]; then
    rendezvous=(--standalone)
else
    if [ -z "${RDZV_ENDPOINT:-}" ]; then
        echo "meshwright: RDZV_ENDPOINT: not set, but NNODES = $nodes" >&2
        echo "  fix: set it to host:port of one of the machines, the same on all" >&2
        exit 2
    fi
    rendezvous=(--nnodes "$nodes" --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT"
        --rdzv-id "${RDZV_ID:-meshwright}")
fi
choose_host_settings "$ranks" "$gpus"
# checks the job and tokenises its data before it starts the ranks
exec "$python" -m meshwright.launch.door --prepare $((ranks * nodes)) "${rendezvous[@]}" \
    --nproc-per-node "$ranks" --local-ranks-filter "$log_rank" --role rank --tee 3 \
    "$here/train.py" "${arguments[@]}"
