#!/usr/bin/env bash
# Quantizes a checkpoint in N parts with GNU parallel and merges them.
#
#   parallel.sh INPUT OUT N [options of microscale quantize]
#
# A failed part is tried up to three times. After a failure, run the script again: finished shards
# are kept.
set -euo pipefail
input=$1 out=$2 parts=$3
shift 3
microscale=${MICROSCALE:-microscale}

parallel --halt soon,fail=1 --retries 3 --jobs "${JOBS:-$parts}" --tag --quote \
    "$microscale" quantize "$input" --out "$out" --part "{}/$parts" "$@" ::: $(seq "$parts")
"$microscale" merge "$input" --out "$out"
