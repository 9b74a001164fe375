#!/usr/bin/env bash
# ssh.sh HOST...: one process per host over plain ssh; the first host coordinates.
# All hosts must see this folder and PYTHON at the same path. Arguments for train.py are
# taken from TRAIN_ARGS. Where one process ends, the others are stopped.
set -euo pipefail
[[ $# -gt 0 ]] || { echo "usage: ssh.sh HOST..." >&2; exit 2; }

python=${PYTHON:-python3}
run=${RUN:-ssh}
port=${PORT:-12355}
here=$(cd "$(dirname "$0")" && pwd)
first=$1
flags="--xla_gpu_enable_latency_hiding_scheduler=true"

pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT
index=0
for host in "$@"; do
    $run "$host" "XLA_FLAGS='$flags' $python $here/train.py \
        --coordinator $first:$port --processes $# --process $index ${TRAIN_ARGS:-}" &
    pids+=($!)
    index=$((index + 1))
done
for _ in "${pids[@]}"; do wait -n; done
