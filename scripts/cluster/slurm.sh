#!/usr/bin/env bash
# Submits N parts of a checkpoint as a Slurm array, and the merge that follows them.
#
#   slurm.sh INPUT OUT N [options of microscale quantize]
#
# After a failure, submit the same command again: finished shards are kept.
set -euo pipefail
input=$1 out=$2 parts=$3
shift 3
microscale=${MICROSCALE:-microscale}

quoted() {
    printf '%q ' "$@"
}

array=$(sbatch --parsable --job-name quantize --array "1-$parts" --wrap \
    "$(quoted "$microscale" quantize "$input" --out "$out" "$@") --part \$SLURM_ARRAY_TASK_ID/$parts")
sbatch --job-name merge --dependency "afterok:$array" --kill-on-invalid-dep=yes --wrap \
    "$(quoted "$microscale" merge "$input" --out "$out")"
