#!/usr/bin/env bash
# Train a job: ./run_train.sh [JOB] [--section.key=value ...]
#
#   ./run_train.sh                                            train_configs/llama/debug.yaml, on one rank per accelerator
#   ./run_train.sh my_job.yaml --training.steps=50            another job, a key of it changed
#   NGPU=4 ./run_train.sh                                     four ranks on this machine (CPU or accelerators)
#   PET_NNODES=2 PET_NODE_RANK=0 PET_MASTER_ADDR=... ...      this node's share of a run on several nodes
#
# Makes .venv and installs on the first start. Exit codes: 0 finished; 2 the job is wrong; 3 training stopped itself;
# 143 stopped by a signal, with a checkpoint written. Guide to several nodes: docs/guides/multi_node.md.
set -euo pipefail

caller_dir="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/setup.sh
set_up_environment

# The job is named relative to where the caller stands; paths inside a job are relative to this repository.
job=train_configs/llama/debug.yaml
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
    job="$1"
    shift
    if [ "${job#/}" = "$job" ] && [ -e "$caller_dir/$job" ]; then
        job="$caller_dir/$job"
    fi
fi

count_accelerators() { # without importing torch: that costs seconds
    local visible="${CUDA_VISIBLE_DEVICES-${ASCEND_RT_VISIBLE_DEVICES-unset}}" count=0
    if [ "$visible" != unset ]; then
        count="$(printf '%s' "$visible" | tr ',' '\n' | grep -c '[^[:space:]]' || true)"
    elif command -v nvidia-smi >/dev/null 2>&1; then
        count="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)"
    elif compgen -G '/dev/davinci[0-9]*' >/dev/null; then
        count="$(compgen -G '/dev/davinci[0-9]*' | wc -l)"
    fi
    echo $((count > 0 ? count : 1))
}

ranks="${NGPU:-${PET_NPROC_PER_NODE:-$(count_accelerators)}}"
if ! [[ "$ranks" =~ ^[1-9][0-9]*$ ]]; then
    echo "NGPU = '$ranks': must be a whole number of ranks, at least 1" >&2
    exit 2
fi

# torchrun would give every rank one thread; a rank may use its share of the cores.
if [ -z "${OMP_NUM_THREADS:-}" ] && [ "$ranks" -gt 1 ]; then
    cores="$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)"
    export OMP_NUM_THREADS=$((cores > ranks ? cores / ranks : 1))
fi

# exec: signals reach the process that answers them, and its exit code is ours.
if [ "$ranks" -eq 1 ] && [ -z "${PET_NNODES:-}${PET_RDZV_ENDPOINT:-}" ]; then
    exec .venv/bin/python -m torchtrain.train "$job" "$@"
fi
exec .venv/bin/python scripts/launch/launch_ranks.py --nproc-per-node="$ranks" -m torchtrain.train "$job" "$@"
