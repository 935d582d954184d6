#!/usr/bin/env bash
# Quantizes a checkpoint in N parts by GNU parallel and merges them: parallel.sh INPUT OUT N [options of microscale quantize]
# A part that fails is tried three times. Run it again after a failure: finished shards are kept.
set -euo pipefail
input=$1 out=$2 parts=$3
shift 3
microscale=${MICROSCALE:-microscale}

parallel --halt soon,fail=1 --retries 3 --jobs "${JOBS:-$parts}" --tag --quote \
    "$microscale" quantize "$input" --out "$out" --part "{}/$parts" "$@" ::: $(seq "$parts")
"$microscale" merge "$input" --out "$out"
