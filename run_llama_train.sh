#!/usr/bin/env bash
# Set up if need be, then `meshwright train`: check the config, tokenize what is not yet, train.
#
#   ./run_llama_train.sh [CONFIG] [--section.key value ...]     e.g. --training.steps 1000
#   ./run_llama_train.sh --help                                 its options
#
#   NGPU         ranks on this node               (default: its GPUs, else 2 CPU ranks)
#   CONFIG_FILE  TOML or preset                   (default: debug_model)
#   LOG_RANK     ranks of each node whose log is shown     (default: 0; e.g. 0,1)
#   PYTORCH_ALLOC_CONF  torch's memory of GPUs      (default: expandable_segments:True)
#   NNODES       nodes                            (default: 1)
#   RDZV_ENDPOINT  host:port of one of them, the same on all; needed above one node
#   RDZV_ID      name of the job at that endpoint (default: meshwright)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ -f "$here/scripts/environment.sh" ] || { # sbatch runs a copy of it, in another folder
    echo "meshwright: $0 is not in the repository" >&2
    echo "  fix: for Slurm, cd to the repository, then sbatch multinode_trainer.slurm CONFIG" >&2
    exit 2
}
source "$here/scripts/environment.sh"
prepare_environment
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} # an active environment need not hold meshwright
exec "$python" -P -m meshwright train "$@" # -P: not the working directory's modules
